"""Timing of whole merges, as an engine pays for them. Figures in the docs come from files that these modules wrote
(bench/results/).
"""
