"""Extensions of the documentation site: chapters, quoted code, glossary terms, diagrams and sliders."""
