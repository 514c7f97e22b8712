"""The course: labs and their grader, the ladder of stages, the site's build, and the embedded model's training."""
