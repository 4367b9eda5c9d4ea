"""The minimum of a problem: exact by elimination, or by a beam with a bound; and lower bounds by dual ascent.

`eliminate` and `beam` work on tables, `solver` on problems. `bound` proves lower bounds.
`anytime` keeps the best solution so far under deadlines and interrupts.
"""
