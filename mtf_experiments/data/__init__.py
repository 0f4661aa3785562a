"""Text sources, vocabularies, token stores and the batches made of them.

Nothing here knows of models, training or the named-dimension language: what comes out are numpy arrays.
"""
