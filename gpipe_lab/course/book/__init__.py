"""The course as a static site that needs no network: `python -m gpipe_lab.course.book`, or `make book`."""
