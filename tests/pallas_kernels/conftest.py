"""Puts this folder on the path: the helpers beside this file serve the tests of every op."""
