"""Turns rows into tokens with loss masks, and slots of a plan into arrays. Never imports jax."""

from lorafusion_jax.data.preview import render_preview as render_preview
from lorafusion_jax.data.sources import read_rows as read_rows
from lorafusion_jax.data.template.chat import ChatTemplate as ChatTemplate
from lorafusion_jax.data.tokenized import load_samples as load_samples
from lorafusion_jax.data.tokenized_set import DataReport as DataReport
from lorafusion_jax.data.tokenized_set import TokenizedSet as TokenizedSet
from lorafusion_jax.data.tokenizer import Tokenizer as Tokenizer
from lorafusion_jax.data.tokenizer import load_tokenizer as load_tokenizer
