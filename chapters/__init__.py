"""The course: its chapters, the labs and their grader, the ladder of stages, the site's build, `tutor`'s training."""
