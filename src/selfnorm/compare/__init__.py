"""Trains several recipes on the same data and compares them: `plan`, then `execute` (`worker`, `measure`), then `table`."""
