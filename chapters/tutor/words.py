"""Word lists, invented words, and the split of texts into training and held-out texts.

This module knows nothing of exercises. Whether a text is held out depends only on a hash of the text, so the split is
the same in every process, in every run and on every machine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
T = TypeVar("T")

HELD_OUT_PERCENT = 10


def held_out(key: str) -> bool:
    """Return whether the text ``key`` belongs to the held-out tenth of all texts."""
    return zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT


def draw(split: Split, make: Callable[[], T], key: Callable[[T], str] = str) -> T:
    """Call ``make`` until its result belongs to ``split``, and return the result.

    ``key`` returns the text of a result that decides its split. Raise RuntimeError after 10,000 calls.
    """
    want = split == "heldout"
    for _ in range(10_000):
        item = make()
        if held_out(key(item)) == want:
            return item
    raise RuntimeError(
        f"10,000 random items, the last {key(item)!r}, gave none in the split {split!r}: the items vary too little"
    )


def word_list(text: str) -> tuple[str, ...]:
    """Split ``text`` at bars, or else at commas, or else at white space."""
    return tuple(text.split(next((mark for mark in "|," if mark in text), None)))


FIRST_NAMES = word_list(
    "Ada Adam Aisha Alan Alba Alma Amara Amir Ana Anders Anita Anton Ariel Astrid Aylin Basil Beatriz Bela Ben Bianca "
    "Boris Bruno Camila Carla Cedric Chen Clara Cleo Colin Cora Dario Darya David Dina Dora Edgar Elena Elias Ella "
    "Emil Emma Enzo Erik Esther Eva Farah Felix Fiona Freya Gael Gina Greta Hana Hassan Hector Helga Hugo Ida Igor "
    "Ines Ingrid Iris Isaac Ivan Jana Jasper Joan Jonas Josef Julia Kai Karim Karla Kasper Kenji Kira Lars Laura Lea "
    "Lena Leo Liam Lila Lina Lorenzo Lucas Luisa Magda Malik Mara Marco Maria Mateo Maya Mei Mila Mira Mona Nadia "
    "Nils Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paula Pedro Petra Priya Quentin Rafael Ravi Rhea Rosa "
    "Rufus Ruth Sami Samuel Sara Selma Silas Sofia Sonja Stefan Tara Tariq Theo Tilda Tom Uma Ursula Valentin Vera "
    "Victor Viola Walter Wanda Willa Yara Yusuf Yuki Zara Zelda Zoe"
)
LAST_NAMES = word_list(
    "Abbott Adler Alvarez Amsel Arden Ashby Baker Barlow Becker Bell Berger Blake Bloom Brandt Brook Byrne Calder "
    "Castro Chan Conti Cooper Cruz Dahl Danvers Diaz Drake Duarte Eames Eklund Ellis Falk Farrow Ferro Finch Fischer "
    "Flint Fontana Foster Frost Galli Garcia Garrick Gold Grant Gray Hale Hansen Harper Hart Haas Hayes Heller Holm "
    "Horn Ibarra Iqbal Ito Jansen Jarvis Juarez Kahn Kaur Keller Khan Kim Klein Kowal Kramer Lang Larsen Lind Lopez "
    "Lund Maas Mann Marsh Mendes Meyer Mills Monroe Moore Moreau Moss Nair Nakata Nash Nolan Novak Nyberg Okafor "
    "Olsen Ortega Osei Page Park Patel Pereira Petrov Pike Popov Quist Ramos Reed Reyes Rossi Rowe Sato Sauer Shah "
    "Silva Singh Soto Stone Storm Suzuki Tanaka Thorn Torres Tran Turner Vance Varga Vega Vogel Wagner Walsh Weber "
    "West Winter Wolf Wong Yamada Young Zeller Zhao"
)
ADJECTIVES = word_list(
    "amber ancient big blue brass bright broken bronze calm central clean cold copper coral crooked crystal dark deep "
    "dusty early east eastern empty fancy far first foggy front glass golden grand gray great green hidden high hollow "
    "iron ivory large last late left light little long lower lucky main marble middle modern narrow new noisy north "
    "northern oak old open outer painted pale paper pink plain purple quiet rear red right round royal rusty sandy "
    "scarlet second secret short silent silver small smoky snowy south southern square steep stone stony sunny tall "
    "third tiny upper velvet warm west western white wide wild windy winter wooden yellow young"
)
PLACES = word_list(
    "archive,attic,bakery,balcony,bank,barn,basement,bathhouse,bookshop,bridge,cabin,cafe,canteen,cellar,chapel,clinic,"
    "clock tower,courtyard,darkroom,dining hall,dock,dormitory,farm,ferry,fountain,gallery,garage,garden,gate,"
    "greenhouse,guest house,gym,hall,harbor,hut,kitchen,lab,laboratory,laundry,lecture hall,library,lighthouse,"
    "loading dock,lobby,lounge,market,meeting room,mill,museum,nursery,observatory,office,orchard,parking lot,pavilion,"
    "pharmacy,pier,playground,pool,post office,print shop,reading room,reception,rooftop,sauna,school,shed,shop,stable,"
    "stage,station,storage room,storeroom,studio,swimming pool,tea room,terrace,theater,tool shed,tower,town hall,"
    "tunnel,vault,village,warehouse,wine cellar,workshop,yard,zoo"
)
ITEMS = word_list(
    "almond cake,apple juice,apron,backpack,bag of rice,ball,banana bread,basket,bean soup,bell,bicycle,blanket,"
    "bottle of milk,bowl,box of chalk,bread roll,brush,bucket,cable,camera,candle,canoe,carrot soup,chair,cheese pie,"
    "chess set,"
    "clock,coat,coffee,compass,cookie,cup of tea,desk,drill,drum,fan,fig tart,flag,flashlight,flute,fish stew,glass of "
    "lemonade,globe,guitar,hammer,hat,helmet,hot chocolate,ink bottle,jacket,jar of honey,kayak,kettle,keyboard,kite,"
    "ladder,lamp,lantern,laptop,lens,lentil soup,locker,loaf of bread,map,microscope,mirror,mug,mushroom pie,notebook,"
    "onion soup,paint box,pair of gloves,pair of skis,pancake,pear cider,pen,pencil,piano,pillow,plum jam,poster,"
    "printer,projector,pump,radio,raincoat,robot,rope,rug,ruler,saddle,salad,sandwich,saw,scarf,scooter,shovel,sled,"
    "spoon,stamp,stool,stove,surfboard,table,telescope,tent,ticket,toaster,towel,toy train,tray,tripod,trumpet,"
    "umbrella,vase,violin,wallet,watch,whistle,wrench"
)
CLUBS = word_list(
    "archery art astronomy badminton baking ballet bird boxing book bridge camera ceramics chemistry chess climbing "
    "coding comedy cooking cycling dance debate diving drama drawing fencing film fishing folk football garden guitar "
    "gymnastics hiking history hockey jazz judo juggling knitting language law magic math nature opera origami "
    "painting philosophy photo physics poetry pottery puppet quilting radio reading robot robotics rowing rugby "
    "running sailing science sewing singing skating skiing soccer surfing swimming tea tennis theater train travel "
    "volunteer walking weaving woodwork writing yoga"
)
GROUPS = ("club", "team", "group", "class", "society", "course", "circle", "workshop")
COLORS = word_list(
    "amber black blue brown copper cream gray green gold indigo lilac navy olive orange pink purple red "
    "silver teal turquoise violet white yellow"
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
MATERIALS = word_list(
    "aluminum bamboo brass brick bronze clay copper cork cotton glass granite iron leather linen marble "
    "oak paper pine plastic rubber sandstone silk silver slate steel tin velvet walnut wax wool"
)
ANIMALS = word_list(
    "badger bear beaver bee camel cat cow crab crow deer dog dolphin donkey duck eagle falcon ferret fox "
    "frog goat goose hamster hawk hedgehog heron horse lion lizard mole monkey mouse newt otter owl parrot "
    "penguin pig pony rabbit raven rooster salmon seal sheep snail snake sparrow spider squirrel swan tiger "
    "toad turtle whale wolf zebra"
)
FOODS = word_list(
    "apple apricot bacon banana barley bean beet biscuit bread broccoli butter cabbage cake carrot celery "
    "cheese cherry chestnut coconut corn cream cucumber curry dumpling egg fig garlic ginger grape ham honey "
    "jam kale leek lemon lentil lettuce lime mango melon milk mint mushroom mustard noodle nut oat olive onion "
    "orange pancake papaya parsley pasta peach peanut pear pepper pickle pie pizza plum popcorn potato pumpkin "
    "quince radish raisin rice salad salt soup spinach sugar tea toast tofu tomato turnip vanilla waffle "
    "walnut yogurt"
)
THINGS = word_list(
    "acorn anchor arrow atom bamboo barrel beach blanket blossom boat bone book boot branch brick bubble "
    "bucket button cactus cannon canyon carpet castle cave chain circle cliff cloud coin comet cotton cradle "
    "crown curtain desert diamond door dragon dream drum dust engine feather fence field fire flame flood "
    "flower forest fork frame giant glacier glove grass gravel hammer harbor hill hook hour ice island jewel "
    "journey jungle key king kite lake lamp leaf letter lightning line lock magnet mask meadow message minute "
    "mirror moon morning mountain needle nest night ocean paint palace pearl pebble pillow planet pocket "
    "pond puzzle queen rain rainbow ribbon ring river road rocket roof root rope rose sail sand shadow shell "
    "ship shoe sky smoke snow song spark spoon spring stair star stone storm story stream street summer sun "
    "sword table thread thunder ticket tide torch tower train tree tunnel valley vessel village violet "
    "voice wagon wall water wave wheel whisper wind window wing winter wire wood world yarn"
)
VERBS = word_list(
    "add answer ask bake bend blow boil borrow break bring build buy call carry catch change choose clean "
    "climb close cook count cover cross cut dance dig draw dream drink drive drop eat fall feed find finish "
    "fix float fly fold follow forget give grow hear help hide hold jump keep kick laugh learn leave lend "
    "lift listen look lose make meet mix move open paint pay pick plan plant play point pour pull push put "
    "reach read rest ride ring roll run save say see sell send sew shake share shout show sing sit sleep "
    "smell smile speak spend spin stand start stay stop swim take talk taste teach tell think throw tie touch "
    "travel try turn wait wake walk wash watch wear win wish work write"
)
EVERYDAY = word_list(
    "answer apartment artist baby bag bathroom bed birthday body bottle boy brother building business camp car chair "
    "child church city class coat college company computer cook country cousin culture dad daughter day dinner doctor "
    "dollar dress driver ear earth education email evening exam example eye face family farmer father film finger fish "
    "floor food foot football friend future game girl glass government grandmother group hair half hand hat head heart "
    "history hobby holiday home homework hospital hotel house husband idea internet job joke kid language law lawyer "
    "lesson life list love lunch man market math meal medicine meeting minute mistake mom money month mother movie "
    "museum music name neighbor neck news nose number nurse office paper parent park party password person phone photo "
    "picture place plan plane plant play poem police president price problem program project question recipe reason "
    "religion restaurant result room rule salary school science score secret sentence shirt shop shower sister "
    "sleep sport state student subject swimmer teacher team telephone test thing ticket time town toy travel trip "
    "truth uncle university vacation visit war weather website week weekend wife woman word work worker year"
)
MOODS = word_list(
    "able afraid alone angry asleep awake bad beautiful best better boring busy careful cheap clever crazy dead dear "
    "different difficult dirty dry easy expensive famous fast fat final free fresh friendly full funny good happy hard "
    "healthy heavy high hot hungry ill important interesting kind lazy lonely loud lovely mad nice normal perfect poor "
    "popular possible pretty proud ready real rich sad safe serious sharp sick silly simple slow smart soft special "
    "strange strong stupid sure sweet terrible thick thin thirsty tired true ugly useful weak wet wise worse worst "
    "wrong"
)
NUMBER_WORDS = word_list(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
COMMON_WORDS = tuple(sorted({*ADJECTIVES, *COLORS, *MATERIALS, *ANIMALS, *FOODS, *THINGS, *VERBS}))

_ONSETS = (
    *word_list(
        "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sc sh sk sl sm sn sp st str sw t "
        "th tr v w wh y z"
    ),
    "",
)
_VOWELS = word_list("a e i o u a e i o u ai ea ee ie io oa oo ou ay y")
_CODAS = ("", "", "", *word_list("b ck d ff g k l ld ll lt m mp n nd ng nk nt p r rd rk rn rt s sh sk ss st t th x z"))


def invent(rng: random.Random, syllables: int = 0) -> str:
    """Return an invented word such as `brondel`, with the given number of syllables, or with 1 to 3 if 0."""
    pick, count = rng.choice, syllables or rng.choice((1, 2, 2, 2, 3))
    return "".join(
        pick(_ONSETS) + pick(_VOWELS) + (pick(_CODAS) if i == count - 1 or rng.random() < 0.4 else "")
        for i in range(count)
    )


def any_word(rng: random.Random) -> str:
    """Return a real word three times out of four, otherwise an invented word."""
    return rng.choice(COMMON_WORDS) if rng.random() < 0.75 else invent(rng)


def person(rng: random.Random, split: Split) -> str:
    """Return a full name of the given split."""
    return draw(split, lambda: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}")


def number(rng: random.Random, split: Split, digits: int) -> str:
    """Return a number with ``digits`` digits. With three digits or more, it belongs to the given split."""
    low, high = 10 ** (digits - 1), 10**digits - 1
    if digits < 3:
        return str(rng.randint(low, high))
    return draw(split, lambda: str(rng.randint(low, high)))


def chance(rng: random.Random, percent: float) -> bool:
    """Return True with a probability of ``percent`` percent."""
    return rng.random() * 100 < percent
