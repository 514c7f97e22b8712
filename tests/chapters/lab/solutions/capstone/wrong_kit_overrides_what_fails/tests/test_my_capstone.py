from my_capstone import MyPolicy

from minisgl.testing.policy import PolicyConformance


class TestMyPolicy(PolicyConformance):
    def make(self):
        return MyPolicy()

    def test_one_request(self):
        pass

    def test_shared_prefix(self):
        pass

    def test_small_pool(self):
        pass

    def test_random_requests(self):
        pass
