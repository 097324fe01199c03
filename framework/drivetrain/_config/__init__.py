"""The arguments of `Fit`: their sources, precedence and checks."""
