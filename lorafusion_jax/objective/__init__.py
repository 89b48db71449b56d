"""What training minimises: token losses per adapter."""

from .loss import adapter_hits as adapter_hits
from .loss import adapter_losses as adapter_losses
