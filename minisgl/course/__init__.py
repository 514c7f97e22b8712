"""The course: the labs and their grader, the ladder of stages, the site's build, and the training of `tutor`."""
