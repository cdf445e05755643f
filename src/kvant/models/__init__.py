"""From a model folder to a block stack: config.json, tensors, decoder."""

from kvant.models.checkpoint import load_decoder
from kvant.models.config import ModelConfig, Quantization
from kvant.models.decoder import Decoder

__all__ = ["Decoder", "ModelConfig", "Quantization", "load_decoder"]
