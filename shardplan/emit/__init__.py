"""The step that a plan runs, and the collectives in its compiled form.

`hlo` reads compiled HLO text: the collectives and their wire bytes, which a plan's prediction is checked against.
"""
