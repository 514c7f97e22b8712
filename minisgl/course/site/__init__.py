"""What the documentation's build adds to mkdocs: chapters, quoted code, terms."""
