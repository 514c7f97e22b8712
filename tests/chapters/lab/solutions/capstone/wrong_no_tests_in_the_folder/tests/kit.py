from my_capstone import MyPolicy

from minisgl.testing.policy import PolicyConformance


class TestMyPolicy(PolicyConformance):
    def make(self):
        return MyPolicy()
