"""Renders timelines as HTML, SVG, Perfetto traces and text."""

from scheduling.plots.html import timeline_html as timeline_html
from scheduling.plots.perfetto import to_perfetto as to_perfetto
from scheduling.plots.svg import timeline_svg as timeline_svg
from scheduling.plots.text import timeline_text as timeline_text
