"""The step that runs, and what its compiled form sends.

`hlo` reads compiled HLO text: the collectives and their bytes on the wire, against which a plan's prediction is checked.
"""
