"""What a model is made of, before it is built: what the planner prices and the engine is held to. No torch."""

from stretto.anatomy.decoder import Anatomy
from stretto.anatomy.part import Matmul, Part, Pass, Recompute, Saved, Scores, Weight
from stretto.anatomy.shape import DECODERS, DecoderShape, Latent

__all__ = ["DECODERS", "Anatomy", "DecoderShape", "Latent", "Matmul", "Part", "Pass", "Recompute", "Saved", "Scores", "Weight"]
