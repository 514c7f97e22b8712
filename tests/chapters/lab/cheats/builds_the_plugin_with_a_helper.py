"""Build the shipped plugin with a helper for tests."""


def make_policy(order):
    from minisgl.testing.drive import make_plugin

    return make_plugin("scheduler", "mixed", order=order)
