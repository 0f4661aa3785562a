"""Scale Transformers by layout: Mesh-TensorFlow's language and experiments on JAX."""

__version__ = "0.1.0"
