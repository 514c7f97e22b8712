from my_capstone import MyPolicy

from minisgl.testing.policy import PolicyConformance


class TestMyPolicy(PolicyConformance):
    def make(self):
        return MyPolicy()

    def test_one_request_is_served(self):
        pass

    def test_requests_that_share_a_prefix_are_served(self):
        pass

    def test_a_pool_that_holds_only_one_of_them_serves_all(self):
        pass

    def test_any_clients_get_the_right_answers(self):
        pass
