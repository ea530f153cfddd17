"""Operations on tensors, one a folder: ``reference.py`` is plain torch, tensors in and tensors out."""
