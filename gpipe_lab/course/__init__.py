"""What makes the notebooks a course: exercises, hints, predictions, progress, and the machine's report."""
