"""The reference of the tests: training programs as plain values, run by a plain loop and under `Fit`, and compared."""
