"""The minimum of a problem: exact by elimination, by a beam within a bound, and lower bounds by dual ascent.

`eliminate` and `beam` work on tables, `solver` on problems; `bound` and `narrow` prove what no assignment undercuts; `anytime`
keeps the best so far under deadlines and interrupts.
"""
