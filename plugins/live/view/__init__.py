"""What ``live=auto`` and ``live=on`` share: the options, the observer, the routes and the page."""
