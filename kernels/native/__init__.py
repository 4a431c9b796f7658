"""The compiled CPU step: loading its library and asking what the processor can run of it."""
