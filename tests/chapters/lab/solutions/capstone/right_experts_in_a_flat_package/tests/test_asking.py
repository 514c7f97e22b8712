from asking.plugin import AskingMoe

from minisgl.testing.moe import MoeConformance


class TestAsking(MoeConformance):
    def make(self):
        return AskingMoe()
