"""Arrival traces: generated, or read from the columns of public ones."""

from scheduling.online.traces.generate import TRACES as TRACES
from scheduling.online.traces.generate import generate_trace as generate_trace
