"""The chapters and their labs' descriptions, beside the code so that an installed minisgl has them too."""
