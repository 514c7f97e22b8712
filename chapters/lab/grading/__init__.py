"""The instructor's side of the labs: ``python -m minisgl.lab grade`` runs students' files in isolated processes."""
