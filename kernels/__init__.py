"""Operations of the forward pass, each with a pure PyTorch reference beside its fast paths.

Cheap to import on purpose: no triton, no compiler, no version attribute. A distribution of the
same name exists and other libraries probe for it, so importing this must cost and promise nothing.
"""
