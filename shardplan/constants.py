"""The numbers that decide plans, in one value, each with where it comes from.

A number that was measured or published says where; a *choice* says what it balances; a number that was fitted says to what.
Numbers are not here if every value gives the same plans: units, codes, and the sizes of pieces of work. A plan's file records
the values that it was planned with (`CONSTANTS.literals`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Constants:
    """Prices first, then what is searched, in the order of the rooms."""

    # -- equality --------------------------------------------------------------------------------------------------------

    rounding: float = 1e-9
    """Two costs closer than this fraction are equal: sums of floats differ by less. Ties go to the smaller id."""
    least_gain: float = 1e-6
    """What a plan must gain over a simpler or earlier one, as a fraction: above the rounding of the search's tables."""
    rounding_bytes: float = 0.01
    """The rounding error of sums of parts of tensors, in bytes, before they are rounded up."""

    # -- placement -------------------------------------------------------------------------------------------------------

    model_error: float = 0.086
    """How much faster a step on groups of devices must be than the plan on all devices to be taken. The median error of 242
    published steps (docs/accuracy.md, "Published steps"): below that, the model does not tell two plans apart."""
    branches_planned: int = 2
    """So many groupings of branches, the fastest as simulated, are planned whole. Choice: the others differ little from these."""

    branch_tasks: int = 200
    """Finer branches than this many are not scheduled. Choice: FD-DPS takes seconds for hundreds of tasks."""
    beta: float = 50.0
    """``beta`` of FlexFlow's equation 1 for each operator: of n operators, each takes about 1/n of a step, and a change that
    costs a fiftieth of that is accepted in one of e draws. With one value for all networks, the chains of large ones wander off.
    Choice."""
    least_proposals: tuple[int, int] = (1000, 50)
    """The stop rule of a chain applies after this many proposals, and this many for each operator. Choice."""
    from_neighbour: float = 0.4
    """The part of proposals that take the devices of an operator next to the one that changes: what is beside data moves little.
    Choice."""
    whole_layers: float = 0.2
    """The part of proposals that change all operators of a layer at once. Choice: of 0, 0.2 and 0.5, it found the shortest step
    of rnnlm (10 steps) on `flexflow-p100:4` from data parallelism in 10,000 proposals (83.2, 79.2 and 79.3 ms)."""
    merge_loss: float = 0.02
    """What chains find is merged into fewer regions as long as a step takes at most this much longer: regions are planned inside
    afterwards, and each border between two costs launches that the simulation leaves out. Choice."""
    regions_planned: int = 4
    """So many of the candidates get plans of their regions: the best as data parallel on their groups, and what chains found.
    Choice."""

    # -- pipelines -------------------------------------------------------------------------------------------------------

    stage_window: float = 0.25
    """The forward pass is cut where fewer bytes cross than anywhere within so large a part of a stage. Choice."""
    whole_loop: float = 0.1
    """A loop over layers beside a longer one stays whole where its stage then takes at most this much longer than the others. In
    parts it would be one more chunk of each stage, with transfers of its own. Choice."""
    chunk_gain: float = 0.01
    """More chunks are planned if they shorten the schedule on paper by this fraction. Choice: planning takes twice as long for
    it."""
    pipeline_effort: int = 20_000
    """Tasks of a pipeline times those taken out and placed anew, at most: a limit on the time of scheduling. Choice."""
    shortened_starts: int = 2
    """The starts that are shortened: the shortest ones. Choice."""

    # -- schedules of tasks ----------------------------------------------------------------------------------------------

    trials_per_task: float = 2.0
    """Tasks taken out for each task of the graph, at most. Choice: a limit on the time of scheduling."""
    tail_weight: float = 0.5
    """The weight of what follows a task at least, beside its own end, where a device is chosen. Fitted to 200 random DAGs like
    those of benchmarks/fd_dps.py: HEFT's makespan is undercut by 1.3% in the mean with 0.5, by 0.7% with 1 and by nothing with 0.
    On 200 others (its seed 7) by 2.2% with 0.5, 2.3% with 0.25, 1.9% with 1."""
    paper_tasks: int = 50
    """Up to so many tasks, the paper's own rules are one start more. They generate the critical path anew for each task: for 100
    tasks, this start takes more than twice the time of the two others, and rarely gives the best schedule. Choice."""

    # -- cost: compute, collectives, overlap -----------------------------------------------------------------------------

    most_positions: int = 10_000_000
    """The most positions of a window that are counted one by one (80 MB): of more, all count as inside. Choice."""
    tiles: tuple[tuple[int, int, float], ...] = (
        (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.85), (64, 256, 0.85), (128, 64, 0.8), (64, 128, 0.8),
        (64, 64, 0.65),
    )  # fmt: skip
    """(rows, columns, part of the rate of the largest tile) of each tile of a product.

    The shapes and their order are those of NVIDIA's guide to matrix multiplication, from the most efficient to the least. The
    parts are a choice: smaller tiles reuse each operand less, 64x64 by a factor of 2.7, and caches hide some of that.
    """
    depth_splits: tuple[int, ...] = (1, 2, 4, 8, 16)
    """The parts that the sum of a product may be split into (CUTLASS, "Efficient GEMM", split-K). Adding them up is free."""
    least_depth: int = 256
    """The fewest terms of such a part. Choice: long enough that loading the first terms hardly counts."""
    tree_connection: float = 0.65
    """The part of a connection's bandwidth that a tree reaches between two devices or nodes, each of which passes on sums upwards
    and results downwards. Fitted to P2's A100 rows whose group has a link to itself (appendix A: 2 GPUs of a node 0.62, 2 nodes
    0.66)."""
    saved_overlap: float = 0.5
    """The part of what overlap could save that a compiled program saves. Choice: plans compiled for H100s save from a tenth of it
    to nearly all, somewhat over half in the median (``python benchmarks/by_hand.py --table planned``)."""
    least_weight: float = 0.02
    """The least weight of compute and of hideable communication. Choice: with a weight of zero, the search would spend them
    freely."""

    # -- graph: kernels --------------------------------------------------------------------------------------------------

    longest_row: int = 2**14
    """The most elements of a row that one kernel holds: XLA (jaxlib 0.10.2, 0.12.0.1) splits the reduction of a longer one."""
    longest_column: int = 2**12
    """The most elements of a column that XLA (jaxlib 0.10.2, 0.12.0.1) reduces without splitting the reduction in two."""
    farthest_kernel: int = 200
    """The search for a kernel between two others looks at so many behind the first, then the two stay apart. Choice: it bounds
    the work."""
    minor_branch_share: float = 1e-3
    """The share of its cost that any branch but the dearest keeps. Choice: enough for the search to lay it out by cost."""

    # -- remat -----------------------------------------------------------------------------------------------------------

    least_block_share: float = 0.02
    """A block that saves a smaller share of all bytes kept for backward passes is not recomputed. Choice."""

    # -- collectives -----------------------------------------------------------------------------------------------------

    program_steps: int = 5
    """The most steps of a reduction program (P2, section 4.2)."""
    deepest_graph: int = 3
    """Hierarchies of up to this many levels are walked whole; deeper ones have neighbouring levels joined. Choice: it bounds the
    work."""
    step_nudge: float = 1e-11
    """Added for each step of a program, times one collective over everything: above rounding errors, below what can be
    measured."""
    slice_s: float = 1e-12
    """The seconds of a local slice, which moves nothing; the graph library reads an exact zero as no edge."""
    padding: int = 8
    """Padding inside the step may add at most one part in this many to a dim. Choice."""
    ordered_factors: int = 3
    """With up to this many factors, or levels, a dim's factors may have any order (`collectives.moves.orders`). Choice: orders
    grow by the factorial."""
    wide_bytes: float = 2.0**40
    """Bytes of a collective whose latency is nothing next to what it sends: the slope of its price is read there."""
    latency_share: float = 0.1
    """A bundle of collectives is full when its latency is no more than this share of its time. Choice."""

    # -- search: variables -----------------------------------------------------------------------------------------------

    timesteps: int = 3
    """At least this many equal uses of one weight are unrolled timesteps, which share one choice (Tofu, section 5.1)."""
    layer_periods: int = 64
    """The number of block lengths to try: the commonest distances between equal ops. Choice: it bounds the work."""
    view_pieces: int = 6
    """A group of at most this many tensors (a query, key and value with their gradients) has a layout chosen for its readers, and
    needs no view. Choice."""
    joined_operands: int = 3
    """An op of more operands, as a concatenation of many pieces, reads them as they are stored, and asks for no view. Choice."""
    open_entries: int = 1 << 17
    """An op whose table would have more entries gets a variable for its strategy instead (`Ops.opened`). Choice: the table of one
    op stays in a core's cache."""
    whole_window: float = 1 / 2
    """Outside of loops, a window of at least this fraction of the step's compute counts as unlimited: only the compute of the
    whole step limits it. Choice."""
    least_window: float = 1 / 1024
    """A window of less than this fraction of the step's compute counts as none. Choice."""

    # -- search: minimum and bound ---------------------------------------------------------------------------------------

    beam_width: int = 1024
    """Partial assignments that the beam keeps at each step. Choice."""
    beam_part_entries: int = 1 << 20
    """In a beam, a variable is eliminated from all its tables at once up to this many entries in their joint table. Choice."""
    exact_entries: int = 100_000_000
    """Up to this many entries in one table (0.8 GB) there is no beam: elimination does repeated work once, a beam every time."""
    bound_enough: float = 5e-5
    """The ascent of the bound ends when two sweeps gain less than this fraction, or it is that close to a known cost. Choice."""
    bound_work: float = 2e9
    """The most table entries that an ascent visits: three or four seconds. Counted, so that bounds are reproducible."""
    unfinished_bound_work: float = 1e8
    """The same for a search that was stopped: its user waits. Choice."""
    bound_call: int = 10_000
    """The overhead of visiting a table in an ascent, in entries."""
    bound_sweeps: int = 400
    """The most sweeps of one ascent, for small problems: by then the bound no longer rises (``bound_enough``)."""
    bound_entries: int = 300_000_000
    """The most table entries that an ascent holds, 8 bytes each. Where there are more, the bound is that of the compute alone."""
    bound_worst: float = 4.0
    """Infeasible states cost this multiple of the plan's cost in the bound; the best plan has none of them. Choice."""
    bound_prices: int = 6
    """The most prices on bytes that the bound tries. Choice."""

    # -- search: one problem ---------------------------------------------------------------------------------------------

    rival_entries: int = 1_000_000
    """Up to this many predicted entries in one table a baseline is solved jointly. Choice: none is worth as much time as the
    plan."""
    rival_seeds: int = 3
    """This many of the fastest baselines, and of the fastest that fit, start a search that neither is exact nor reaches
    them. Choice."""
    joint_entries: int = 30_000_000
    """Up to this many predicted entries in one table, variables are solved jointly, repeatedly where needed. Choice: a second."""
    few_entries: int = 3_000_000
    """Up to this many predicted entries in all, pairs of factors are tried in any case: the tables are small. Choice."""
    long_entries: int = 50_000_000
    """With more predicted table entries in all, a joint solve takes seconds: a simpler solution is found first, in case of an
    interrupt."""
    memory_prices: int = 24
    """The most prices on bytes that are tried. Choice."""
    dearer: float = 8.0
    """Each price on bytes is this multiple of the last where no new peak appears or the peak fell little. Choice."""
    fell_little: float = 0.98
    """The peak fell little if it is still above this fraction of the last. Choice."""
    dearest_peak: int = 16
    """The bytes of a peak cost at most this many times the longest table entry: one entry is capped there, but entries add up.
    Choice."""
    closer_prices: int = 7
    """The most prices tried between a solution that fits and one that does not. Choice."""
    repairs: int = 3
    """The most solutions over the limit that are changed until they fit. Choice."""
    repair_steps: int = 40
    """The most changes of one repair. Choice."""
    repair_share: float = 0.02
    """A variable that holds less than this fraction of the excess keeps its layout. Choice."""
    repair_variables: int = 24
    """Variables considered in a step of a repair: those that hold the most at the peak. Choice."""
    exchanges: int = 3
    """The most solutions over the limit from which the best within it takes layouts. Choice."""
    repair_trials: int = 400
    """The most changes tried in one call: each computes the memory of the whole step. Choice."""
    repair_pairs: int = 60
    """Up to this many layouts to choose, pairs of them are tried too. Choice."""

    # -- schedule --------------------------------------------------------------------------------------------------------

    gathers_ahead: int = 2
    """A gather may begin as early as the reader of the gather this many before it, so at most this many more copies are held.
    Choice."""

    # -- planning --------------------------------------------------------------------------------------------------------

    patience: int = 3
    """How many solutions in a row may be no faster before no more are scheduled. Choice."""
    refinement_gain: float = 0.005
    """Where tables are large, a search over four factors or more takes seconds. So a factoring of three factors or more whose
    optimum is not proved is split further only if it gained this fraction over the one that it splits; and once the best with so
    many factors does not gain this over the best with one fewer, no more of them are searched. For the same reason nothing is
    searched within the memory limit where less than this can be gained: over a factoring whose best without a limit gains no more
    over the best that fits, or for other numbers of microbatches in flight. Choice."""
    most_layouts: int = 5_000
    """The most layouts of one value: the tables of a resharding have an entry for each pair, 8 bytes each."""
    factorings_tried: int = 8
    """The most factorings that are searched, twice as many for steps of up to ``small_step`` ops. Counted, not timed, so that
    plans are reproducible."""
    small_step: int = 400
    """The most ops of a step whose tables are small enough for twice as many factorings. Choice."""
    split_factors: int = 4
    """The most factors of a split: the number of layouts grows exponentially with the number of factors. Choice."""
    stuck_share: float = 0.02
    """A level is split from the start if more than this fraction of the flops is in ops whose loops divide only by parts of it.
    Choice."""
    multipliers_between: int = 2
    """The most multipliers that are tried between the two assumptions. Choice."""
    company_matters: float = 0.01
    """The part by which a step must be slower in its own company to be searched again: about what search and schedule differ
    by."""
    deep_share: float = 0.25
    """Equal layers share one choice where this part of the variables is left at most: from about five layers. Over three factors
    and more this shortens the search; a step of few layers would lose by it, as its first and last layers differ from the
    others. Choice."""
    fewer_parts: int = 3
    """The most trials of the bisection for fewer recomputed parts. Choice."""

    @property
    def literals(self) -> Mapping[str, str]:
        """Each constant as a Python literal, by name."""
        return {f.name: repr(getattr(self, f.name)) for f in fields(self)}


CONSTANTS = Constants()
