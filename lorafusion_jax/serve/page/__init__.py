"""The web page: plain HTML, CSS and JavaScript, served as they are."""
