"""The live view (the group ``live``): a web page on which the running server shows its batches, pages and tree."""
