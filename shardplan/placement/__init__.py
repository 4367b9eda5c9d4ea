"""Where ops run: operators, configurations on any devices, and the search for the best (FlexFlow, Jia et al., MLSys 2019).

`grouping` makes the graph of operators of a step (section 3), `configurations` the ways to cut and place one (section 4),
`task_graph` the tasks of a strategy (5.1) and `simulation` their timeline, in full or after a change (5.2, 5.3).
"""
