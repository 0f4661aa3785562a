"""Programs in the language: layers, the Transformer, the language model, and the two-layer example of the paper."""
