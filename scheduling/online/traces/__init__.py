"""Arrival traces: generated, or read from CSV files."""

from scheduling.online.traces.generate import TRACES as TRACES
from scheduling.online.traces.generate import TraceShape as TraceShape
from scheduling.online.traces.generate import generate_trace as generate_trace
from scheduling.online.traces.read import read_trace as read_trace
from scheduling.online.traces.read import write_trace as write_trace
