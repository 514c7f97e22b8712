# ruff: noqa: E501 (one definition a line)
"""The terms of LLM serving that `tutor` can explain.

This module has the terms with their definitions, pairs of terms to compare, and the refusals for unknown terms. The
phrasings of the questions are in `phrasings`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from minisgl.chapters.tutor import phrasings
from minisgl.chapters.tutor.words import COMMON_WORDS, LAST_NAMES, Split, chance, draw, invent, word_list


@dataclass(frozen=True)
class Term:
    """One term of the glossary. ``article`` is a, an, the or empty; ``aliases`` are terms of the same meaning."""

    name: str
    article: str
    definition: str
    aliases: tuple[str, ...] = ()


def _term(names: str, definition: str) -> Term:
    first, *aliases = (name.strip() for name in names.split("|"))
    head, _, rest = first.partition(" ")
    article, name = (head, rest) if head in ("a", "an", "the") else ("", first)
    return Term(name, article, definition, tuple(aliases))


TERMS: tuple[Term, ...] = tuple(
    _term(*line.split(" := "))
    for line in """
a token := A token is the unit that a language model reads and writes: a word, a piece of a word, or a single byte. Each has a number.
a tokenizer := A tokenizer turns text into token numbers and back. It always cuts the same text in the same way.
detokenization | detokenizer | incremental detokenization := Detokenization turns token numbers back into text. When streaming, it holds back bytes that do not yet make a whole character.
a vocabulary := The vocabulary is the list of all tokens that a model knows. The model gives each of them a score at every step.
byte pair encoding | BPE := Byte pair encoding builds a vocabulary by joining the most frequent pair of neighbours again and again, starting from single bytes.
a chat template := A chat template writes a conversation as one text with markers for who is speaking. The model was trained on exactly this form.
a prompt := A prompt is the text that a request starts with. The model reads all of it before it writes the first new token.
a context window | context length := The context window is the largest number of tokens, prompt and answer together, that a model can handle in one request.
a large language model | LLM | language model := A large language model predicts the next token from all tokens before it. Doing so again and again, it writes text.
inference := Inference is running a trained model to get answers. Its weights do not change while it runs.
an LLM serving engine | serving engine | inference engine | inference server := An LLM serving engine runs a language model for many users at once. It decides which request computes next and where its memory lies.
minisgl := minisgl is an LLM serving engine that people take apart to learn how serving works. Each of its parts can be replaced by a plugin.
a plugin := A plugin is one file that replaces one part of the server, such as the cache or the scheduler policy. The core works with any plugin and names none.
a hook := A hook is a named place where the core asks the plugins for something. A plugin answers it with a function of the same name.
a request := A request is one prompt with its sampling parameters and the answer that grows from it. It ends with exactly one final reply.
a batch | batching := A batch is the set of requests that are computed together in one step. The weights are read once for all of them.
batch size := The batch size is the number of requests that are computed in one step. More of them share one reading of the weights.
a step | iteration | engine step := A step is one run of the model over one batch. Every running request in it gets at most one new token.
a forward pass := A forward pass sends the tokens of a batch through all layers of the model once and ends with the logits.
prefill | prefilling | the prefill phase := Prefill is the phase that reads the prompt: all its tokens go through the model at once and fill the KV cache. It is limited by arithmetic.
decode | decoding | the decode phase := Decode is the phase that writes the answer, one token a step for each request. It is limited by how fast memory can be read.
autoregressive generation | autoregressive decoding := Autoregressive generation writes one token at a time, and each new token becomes part of the input for the next one.
a KV cache | key-value cache := A KV cache keeps the keys and values of all tokens seen so far, so that each new token is computed without reading the whole text again.
a query vector | query := A query vector says what a token is looking for. Attention compares it with the keys of the tokens before it.
a key vector := A key vector says what a token has to offer. Attention compares it with the query of each later token.
a value vector := A value vector is what a token hands over when another token attends to it.
a page | KV page | block := A page is a piece of KV memory that holds a fixed number of tokens. A request takes one page at a time, so little memory lies unused.
page size := The page size is the number of tokens whose keys and values fit into one page. Small pages waste less, large pages need fewer table entries.
a page table | block table := A page table says, for each running request, in which page of the pool each part of its text lies.
a page pool | KV pool | memory pool := A page pool is the KV memory of the server, cut into pages of equal size. Every page is free, in use by a request, or kept by the cache.
a page ledger | ledger := A page ledger knows the owner of every page and slot. Pages are taken and given back through it, so that none is lost or has two owners.
a slot := A slot is a row of the page table. Each running request holds one from its admission to its end.
paged attention | PagedAttention := Paged attention reads keys and values through a page table, so that the text of a request may lie in scattered pages of memory.
fragmentation | memory fragmentation := Fragmentation is memory that is free but useless, because it is reserved or cut into pieces that are too small. Pages avoid it.
a prefix := A prefix is the beginning of a token sequence. Requests with the same prefix can share its keys and values.
prefix caching | a prefix cache | prefix reuse := Prefix caching keeps the keys and values of finished text, so that a later request that starts the same way skips that part of prefill.
a radix cache | RadixAttention := A radix cache keeps the prefixes of past requests in a radix tree. A new request finds its longest known prefix there and computes only the rest.
a radix tree | a prefix tree := A radix tree stores sequences by their common beginnings. Where two sequences part, the tree splits, and each branch holds what follows.
a cache hit := A cache hit is a part of the prompt whose keys and values are found in the cache. It costs no prefill.
eviction | evict | cache eviction := Eviction takes pages back from the cache when memory runs out. The least recently used pages that nobody needs go first.
LRU | least recently used := LRU means least recently used: when something must leave the cache, it is what nobody has asked for the longest.
a lock | a reference count | cache lock := A lock protects a cached prefix while a request uses it. Only pages without users can be evicted.
retraction | retract | preemption | preempt := Retraction takes a running request out of the batch when pages run out, and puts it back in the queue. It goes on later where it stopped.
admission | admission control := Admission decides whether a waiting request may start. It counts the pages that the request will need, and never promises more than there are.
a scheduler := A scheduler decides in each step which requests compute, and how many of their tokens. It also gives out memory pages.
a scheduler policy | scheduling policy | policy := A scheduler policy plans the next step: it sees the waiting and the running requests and says who gets how many tokens.
FCFS | first come first served := FCFS means first come, first served: waiting requests start in the order in which they arrived.
longest prefix match | longest prefix first | LPM := Longest prefix match starts those waiting requests first that find the most of their prompt in the cache.
starvation := Starvation means that a request waits forever because others are always preferred. A good scheduler bounds the waiting time.
static batching := Static batching runs a batch until its longest request has ended, and only then starts the next one. Short requests wait for long ones.
continuous batching | in-flight batching := Continuous batching lets requests join and leave the batch at every step. No request waits for another one to end.
chunked prefill | chunking | a prefill chunk := Chunked prefill cuts a long prompt into pieces and computes one piece a step, so that running requests do not freeze meanwhile.
a mixed batch | mixed batching := A mixed batch holds decode rows and prefill chunks in the same step. So running requests keep writing while new ones are read.
TTFT | time to first token := TTFT, the time to first token, is how long a user waits from sending the request to the first token of the answer. Queueing and prefill make it long.
inter-token latency | ITL | TPOT | time per output token := Inter-token latency is the time between two tokens of one answer. It tells how smoothly the text flows.
latency := Latency is the time that one request has to wait for something, such as its first token or its end.
throughput := Throughput is how many tokens or requests a server completes in a second, for all users together.
goodput := Goodput is the part of the throughput that also meets its latency goals. Answers that come too late do not count.
a GPU := A GPU is a processor with thousands of small cores and very fast memory. It does the matrix work of a model.
a kernel | GPU kernel := A kernel is a program that runs on the GPU. Each launch costs some time on the host, so fewer and larger kernels are better.
a kernel launch | launch overhead := A kernel launch is the order from the host to the GPU to run one kernel. It costs a few microseconds.
a CUDA graph | CUDA graphs := A CUDA graph records the kernels of a step once and replays them with a single launch. It saves the host time of hundreds of launches.
graph capture | capture := Graph capture records all kernels of a step into a CUDA graph. Shapes and buffer addresses must stay the same afterwards.
padding | batch padding := Padding fills a batch up to a fixed size with rows that do not count. CUDA graphs need it, since their shapes are fixed.
a batch-size bucket | bucket := A batch-size bucket is one of the sizes for which a CUDA graph was captured. A batch is padded up to the next one.
overlap | overlap scheduling := Overlap lets the host prepare the next step while the GPU still computes the current one, so that neither waits for the other.
a stream | CUDA stream := A CUDA stream is a queue of work for the GPU. Its kernels run in the order in which they were put in.
memory bandwidth | bandwidth := Memory bandwidth is how many bytes a GPU can read from its memory in a second. It limits the speed of decode.
arithmetic intensity := Arithmetic intensity is the number of operations done for each byte read from memory. Decode has little of it, prefill has much.
attention | self-attention := Attention lets each token gather information from the tokens before it, weighted by how well their keys match its query.
a causal mask | causal masking := A causal mask hides the future: a token may attend to itself and to the tokens before it, never to later ones.
FlashAttention | flash attention := FlashAttention computes attention in tiles that stay in fast memory, with a running softmax. The large score matrix is never written out.
FlashInfer := FlashInfer is a library of GPU kernels for serving, above all for attention over pages and for sampling.
multi-head attention | an attention head := Multi-head attention runs several attentions side by side. Each head has its own queries, keys and values and looks for other things.
grouped-query attention | GQA := Grouped-query attention lets several query heads share one pair of key and value heads. This makes the KV cache smaller.
softmax := Softmax turns a list of scores into probabilities: all are positive, and together they make one.
a logit | logits := A logit is the raw score that the model gives to a token. Softmax turns logits into probabilities.
sampling := Sampling picks the next token by chance, following the probabilities of the model. Temperature, top-k and top-p shape them first.
greedy decoding | greedy sampling | greedy search := Greedy decoding always takes the token with the highest score. It is sampling at temperature zero.
temperature := Temperature divides the logits before sampling. Below one it makes likely tokens even more likely, above one it makes the choice more random.
top-p | nucleus sampling := Top-p keeps the smallest set of most likely tokens whose probabilities add up to p, and samples only from these.
top-k := Top-k keeps only the k most likely tokens and samples from these.
min-p := Min-p drops all tokens whose probability is less than a fraction p of the highest one.
a repetition penalty := A repetition penalty lowers the scores of tokens that already occurred, so that the text repeats itself less.
a stop string | stop sequence := A stop string ends the answer as soon as the text contains it. It is not part of the reply.
an end-of-sequence token | EOS | EOS token := An end-of-sequence token is the token by which the model says that its answer is complete.
a logprob | logprobs | log probability := A logprob is the logarithm of the probability that the model gave to a token. Zero means certain.
streaming := Streaming sends each piece of the answer as soon as it exists, so that the user can read along.
tensor parallelism | TP := Tensor parallelism cuts the weight matrices of each layer into slices, one for each GPU. All GPUs work on the same tokens.
data parallelism := Data parallelism runs several copies of the model, each with its own requests.
pipeline parallelism := Pipeline parallelism gives each GPU some of the layers. Tokens pass from one GPU to the next.
expert parallelism := Expert parallelism spreads the experts of a mixture over several GPUs and sends each token to where its experts live.
a rank := A rank is the number of one process among those that serve a model together. Rank zero plans the steps for all.
all-reduce := All-reduce adds up a tensor over all ranks and gives every rank the sum. Tensor parallelism needs two of them in each layer.
ring all-reduce := Ring all-reduce passes pieces of a tensor around a circle of ranks, first to add them up and then to share the sums. No rank is the centre.
all-gather := All-gather collects the pieces that all ranks hold and gives every rank the whole.
NCCL := NCCL is a library from NVIDIA with which GPUs exchange data, for example in an all-reduce.
a column-parallel layer | column parallel := A column-parallel layer gives each rank some of the outputs. It needs no exchange before the next row-parallel layer.
a row-parallel layer | row parallel := A row-parallel layer gives each rank some of the inputs. Its partial results are added up by an all-reduce.
a mixture of experts | MoE | mixture-of-experts := A mixture of experts replaces one large feed-forward layer by many small ones, of which only a few compute for each token.
an expert := An expert is one of the small feed-forward networks in a mixture of experts. The router chooses which tokens it sees.
a router | routing | gating := A router gives each expert a score for a token. Only the experts with the best scores compute it.
a transformer := A transformer is a stack of layers that each hold attention and a feed-forward network. Most language models are built this way.
a decoder layer | decoder block := A decoder layer is attention followed by a feed-forward network, each with a norm before it and a residual connection around it.
a feed-forward network | FFN | MLP := A feed-forward network works on each token alone: it widens the vector, applies an activation, and narrows it again.
an embedding := An embedding is the vector that stands for a token at the entrance of the model.
a residual connection | residual stream := A residual connection adds the input of a layer to its output, so that each layer only has to learn a change.
RMSNorm | RMS norm := RMSNorm scales a vector to a fixed average size before a layer uses it. It keeps the numbers in range.
RoPE | rotary position embedding | rotary embedding := RoPE tells attention where a token stands, by turning its query and key by an angle that grows with the position.
quantization := Quantization stores numbers with fewer bits. The model gets smaller and faster, and a little less exact.
speculative decoding := Speculative decoding lets a small model guess several tokens, which the large model then checks in one step.
bf16 | bfloat16 := bf16 is a number format of 16 bits with the range of float32 and less precision. Most models are served in it.
safetensors := safetensors is a file format for weights. It holds plain tensors with their names, can be read piece by piece, and runs no code.
a checkpoint := A checkpoint is a folder with the saved weights of a model and the files that describe it.
the OpenAI API | OpenAI-compatible API := The OpenAI API is the web interface that most clients speak. A server that offers it can be used without changing them.
ZeroMQ := ZeroMQ is a library for messages between processes. The API server, the tokenizers and the scheduler talk through it.
Triton := Triton is a language for GPU kernels that is written in Python. It works on blocks of numbers instead of single threads.
fused kernels | kernel fusion | a fused kernel := Kernel fusion does several operations in one kernel, so that what lies between them never travels to memory and back.
a benchmark := A benchmark measures a server under a load that is described exactly, so that the number can be compared with the one before.
a worker | worker process := A worker is a process with one job, such as the tokenizer or one rank of the scheduler. The processes talk in messages.
the waiting queue | queue | queueing := The waiting queue holds requests that have arrived but not started. Time spent there makes the first token late.
the memory ratio := The memory ratio is the part of GPU memory that the server may use. What the weights leave of it becomes KV pages.
a weight | weights | parameter | parameters := Weights are the numbers that a model learned in training. Every step of decode has to read them all from memory.
training := Training adjusts the weights of a model until it predicts its text well. Serving begins when training has ended.
fine-tuning := Fine-tuning trains a finished model a little further, on text for a special task.
LoRA := LoRA adds small trained matrices to frozen weights. One server can hold many of them and change the model from request to request.
beam search := Beam search extends several beginnings at once and keeps only the best. It costs more than sampling and is rare in chat.
a tensor := A tensor is an array of numbers with any number of dimensions. Weights, activations and KV pages are tensors.
a matrix multiplication | GEMM | matmul := A matrix multiplication combines rows of one matrix with columns of another. Nearly all arithmetic of a model is of this kind.
the hidden size | hidden dimension := The hidden size is the length of the vector that stands for a token between the layers of a model.
HBM | high-bandwidth memory := HBM is the large memory of a GPU. It holds weights and KV pages, and reading it limits decode.
shared memory | SRAM := Shared memory is a small and very fast memory inside a GPU core group. FlashAttention keeps its tiles there.
a warm cache | cold cache | cache warmup := A warm cache already holds the prefixes that requests ask for. A cold cache is still empty, so everything is computed.
a health check := A health check asks a server whether it can answer right now. A load balancer sends no work to one that says no.
metrics | Prometheus := Metrics are numbers that a server reports about itself, such as queue length or tokens a second. Prometheus collects them.
a seed | random seed := A seed fixes the random numbers of sampling, so that the same request gives the same answer again.
vLLM := vLLM is an open-source LLM serving engine. It made paged attention known.
SGLang := SGLang is an open-source LLM serving engine. It made the radix cache known, and minisgl follows many of its ideas.
Hydra := Hydra is a library that puts the configuration of a program together from small files and command-line words.
pluggy := pluggy is the plugin library behind pytest. The hooks of minisgl are called through it.
a conformance test | conformance kit := A conformance test checks that a plugin keeps the promises of its hook, whoever wrote it.
a lab := A lab is an exercise of the course: you write one plugin, and the real server runs with it.
""".strip().splitlines()
)

_PAIRS = (
    "prefill|decode", "throughput|latency", "TTFT|inter-token latency", "static batching|continuous batching",
    "top-k|top-p", "eviction|retraction", "page|page table", "tensor parallelism|pipeline parallelism",
    "KV cache|radix cache", "row-parallel layer|column-parallel layer", "all-reduce|all-gather", "token|tokenizer",
    "sampling|greedy decoding", "prefill|chunked prefill", "scheduler|scheduler policy", "expert|router",
)  # fmt: skip
_PAIR_ASKS = (
    "What is the difference between {x} and {y}?", "Compare {x} and {y}.", "How do {x} and {y} differ?",
    "What is the difference between {x} and {y}?", "{x} or {y}: what is the difference?", "{x} vs {y}",
)  # fmt: skip
UNKNOWN = (
    "I do not know that term. My glossary is about LLM serving; try: What is a radix cache?",
    "I do not know that term. My glossary is about LLM serving; try: What is prefill?",
    "I do not know that term. My glossary is about LLM serving; try: What is a page table?",
)
_STRANGE = word_list(
    "a blockchain|a mortgage|photosynthesis|inflation|gravity|a black hole|a sonnet|democracy|a fjord|jazz|an isotope|"
    "a volcano|the stock market|a prime number|the ozone layer|a noun|a haiku|quantum mechanics|a neutron star|osmosis|"
    "an enzyme|a parliament|the Renaissance|a symphony|impressionism|a croissant|a marathon|the offside rule|yoga|"
    "a compiler|a linked list|recursion|a pointer|a web browser|a firewall|a router table|a mutex|"
    "a virtual machine|a docker container|kubernetes|a git branch|a spreadsheet|a regular expression|an operating system|"
    "gradient descent|backpropagation|a convolution|a random forest|a diffusion model|reinforcement learning|overfitting|"
    "a decision tree|a loss function|dropout|a hash table|a binary tree|a thread pool|a web socket|a load balancer|"
    "a zebra crossing|a passport|happiness|love|time|the moon|a black cat|a sourdough starter|an espresso|a tax return"
)


def ask(rng: random.Random, term: Term, split: Split) -> str:
    """Return a question about ``term`` in a phrasing of the given split."""
    name, article = term.name, term.article
    if term.aliases and chance(rng, 40):
        alias = rng.choice(term.aliases)
        head, _, rest = alias.partition(" ")
        article, name = (head, rest) if head in ("a", "an", "the") else ("", alias)
    if chance(rng, 15):
        article = ""
    return phrasings.pattern(rng, split, loose=len(name) > 6).format(a=f"{article} {name}".strip(), n=name)


def question(rng: random.Random, split: Split) -> tuple[str, str]:
    """Return a question about a known term, and the definition of the term."""
    term = rng.choice(TERMS)
    return ask(rng, term, split), term.definition


def comparison(rng: random.Random) -> tuple[str, str]:
    """Return a question about the difference of two terms, and as the answer both definitions."""
    names = rng.choice(_PAIRS).split("|")
    if chance(rng, 30):
        names.reverse()
    known = {term.name: term for term in TERMS}
    with_article = [f"{known[name].article} {name}".strip() if chance(rng, 70) else name for name in names]
    request = rng.choice(_PAIR_ASKS).format(x=with_article[0], y=with_article[1])
    return request, " ".join(known[name].definition for name in names)


_KNOWN = {name.lower() for term in TERMS for name in (term.name, *term.aliases)}
_KNOWN |= {"cache", "model", "engine", "server", "memory", "weight", "weights", "layer", "head", "key", "value"}


def strange_term(rng: random.Random, split: Split) -> str:
    """Return a term with its article that is not in the glossary, but often similar to a term of the glossary."""
    while True:
        term = _strange_term(rng, split)
        head, _, rest = term.partition(" ")
        if (rest if head in ("a", "an", "the") else term).lower() not in _KNOWN:
            return term


def _strange_term(rng: random.Random, split: Split) -> str:
    kind = rng.randrange(6)
    if kind == 0:
        name = rng.choice(_STRANGE)
        return name if split == "train" else draw(split, lambda: f"a {invent(rng)}")
    if kind == 1:
        return draw(split, lambda: rng.choice(("a ", "", "the ")) + invent(rng))
    if kind == 2:
        return draw(split, lambda: rng.choice(("a ", "an ", "", "the ")) + rng.choice(COMMON_WORDS))
    last = rng.choice(TERMS).name.split(" ")[-1]
    if kind == 3:
        return draw(split, lambda: f"a {invent(rng)} {last}")
    if kind == 4:
        return draw(split, lambda: f"the {rng.choice(LAST_NAMES)} {rng.choice((last, 'theorem', 'effect', 'law'))}")
    return draw(split, lambda: f"a {rng.choice(COMMON_WORDS)} {rng.choice(COMMON_WORDS)}")


def unknown(rng: random.Random, split: Split) -> tuple[str, str]:
    """Return a question about a term that is not in the glossary, and a polite refusal."""
    term = strange_term(rng, split)
    head, _, rest = term.partition(" ")
    name = rest if head in ("a", "an", "the") else term
    return phrasings.pattern(rng, split).format(a=term, n=name), rng.choice(UNKNOWN)
