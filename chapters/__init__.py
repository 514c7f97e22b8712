"""The chapters of the course and the descriptions of their labs, a package so that `pip install` includes them."""
