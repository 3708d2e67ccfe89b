"""Make the models and data of `make demo` and `make demo-images`. Not part of the wheel."""
