from my_capstone import MyPolicy


def test_it_is_there():
    assert MyPolicy(4)
