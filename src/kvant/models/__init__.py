"""From a model folder to a block stack: config.json, tensors, decoder."""

from kvant.models.checkpoint import load_decoder
from kvant.models.config import ModelConfig
from kvant.models.decoder import Decoder
from kvant.models.language_model import LanguageModel
from kvant.models.quantization import Quantization

__all__ = ["Decoder", "LanguageModel", "ModelConfig", "Quantization", "load_decoder"]
