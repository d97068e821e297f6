"""All metrics of M³PC. Their names and labels are an interface: dashboards and alerts use them."""

from typing import Final

from m3pc.telemetry.recorder import SLOT, Metric

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES: Final = tuple(float(2**n) for n in range(11))
UPDATES: Final = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0)

PARTS: Final = ("actor", "planner", "store", "learner", "evaluator")
PHASES: Final = ("collecting", "draining", "learning", "saving", "evaluating", "ending", "ended")

# Run
PHASE = Metric(
    name="m3pc_run_phase",
    kind="gauge",
    help="1 for the phase that the run is in, 0 for the others.",
    label="phase",
    values=PHASES,
)
RUN_STEPS = Metric(
    name="m3pc_run_steps",
    kind="gauge",
    help="Environment steps stored since the start of the run, over all its restarts.",
)
RUN_STEPS_GOAL = Metric(
    name="m3pc_run_steps_goal", kind="gauge", help="Environment steps at which the run ends."
)
PARTS_UP = Metric(
    name="m3pc_run_part_up",
    kind="gauge",
    help="Processes that answer.",
    label="part",
    values=PARTS,
)
PARTS_WANTED = Metric(
    name="m3pc_run_part_wanted",
    kind="gauge",
    help="Processes that the driver wants to run.",
    label="part",
    values=PARTS,
)
PARTS_PARKED = Metric(
    name="m3pc_run_part_parked",
    kind="gauge",
    help="Processes that ended too often and are not started again.",
    label="part",
    values=PARTS,
)
RESTARTS = Metric(
    name="m3pc_run_restarts_total",
    kind="counter",
    help="Processes that were started again after they had ended.",
    label="part",
    values=PARTS,
)
SCALED = Metric(
    name="m3pc_run_scaled_total",
    kind="counter",
    help="Changes of the number of actors by autoscaling.",
    label="direction",
    values=("up", "down"),
)
EVALUATION_RETURN = Metric(
    name="m3pc_run_evaluation_return",
    kind="gauge",
    help="Mean return of the last evaluation, and its standard error.",
    label="which",
    values=("mean", "error"),
)
EVALUATION_SCORE = Metric(
    name="m3pc_run_evaluation_score",
    kind="gauge",
    help=(
        "Mean return of the last evaluation as a normalised D4RL score; 0 is a random policy, "
        "100 an expert."
    ),
)
EVALUATION_STEPS = Metric(
    name="m3pc_run_evaluation_steps",
    kind="gauge",
    help="Environment steps of the run at its last evaluation.",
)

# Actors
ACTOR_UP = Metric(
    name="m3pc_actor_up",
    kind="gauge",
    help="1 while the actor in a slot collects; only the first 256 slots are shown.",
    label=SLOT,
)
RECENT_RETURN = Metric(
    name="m3pc_actor_recent_return",
    kind="gauge",
    help="Return of the last 50 collected episodes, without episodes that were cut short.",
    label="which",
    values=("mean", "best", "worst"),
)
PLAN_RETURN = Metric(
    name="m3pc_actor_plan_return",
    kind="gauge",
    help=(
        "Return that planning predicted at the first step, and the return that followed, as "
        "means over the last 50 complete episodes. Both are discounted as the critic's values "
        "are, and undiscounted where planning is guided by returns."
    ),
    label="which",
    values=("planned", "realised"),
)
ENV_STEPS = Metric(
    name="m3pc_actor_env_steps_total", kind="counter", help="Environment steps taken."
)
EPISODES = Metric(
    name="m3pc_actor_episodes_total",
    kind="counter",
    help="Episodes that ended.",
    label="outcome",
    values=("terminated", "truncated", "aborted"),
)
ENV_FAULTS = Metric(
    name="m3pc_actor_env_faults_total",
    kind="counter",
    help="Environments that were replaced because of a fault.",
    label="reason",
    values=("nan", "crash", "timeout", "shape"),
)
UNACKED = Metric(
    name="m3pc_actor_unacked_episodes",
    kind="gauge",
    help="Episodes that the store has not acknowledged yet.",
)
ACTOR_BLOCKED = Metric(
    name="m3pc_actor_blocked_seconds_total",
    kind="counter",
    help="Seconds in which an actor could not step its environments, by what it waited for.",
    label="on",
    values=("planner", "replay", "stale"),
)
ACTOR_STEPPING = Metric(
    name="m3pc_actor_stepping_seconds_total",
    kind="counter",
    help="Seconds spent in the step functions of environments.",
)
STALENESS = Metric(
    name="m3pc_actor_policy_staleness_updates",
    kind="histogram",
    help=(
        "Updates of the model between an episode's policy and the learner, when the learner "
        "receives the episode."
    ),
    buckets=UPDATES,
)

# Planner
REQUESTS = Metric(
    name="m3pc_planner_requests_total",
    kind="counter",
    help="Requests answered.",
    label="result",
    values=("ok", "retry", "late", "bad", "failed"),
)
PLAN_SECONDS = Metric(
    name="m3pc_planner_request_duration_seconds",
    kind="histogram",
    help="Duration of a request: in the queue, in computation, and in total.",
    label="stage",
    values=("queue", "compute", "total"),
    buckets=SECONDS,
)
BATCH_ROWS = Metric(
    name="m3pc_planner_batch_size",
    kind="histogram",
    help="Environments computed in one batch.",
    buckets=SIZES,
)
EFFECTIVE_CANDIDATES = Metric(
    name="m3pc_planner_effective_candidates",
    kind="histogram",
    help=(
        "Effective number of candidates (1 / sum of squared weights), as a mean over each request."
    ),
    buckets=SIZES,
)
UTILITY_STD = Metric(
    name="m3pc_planner_utility_spread",
    kind="gauge",
    help="Standard deviation of utilities over the candidates, as a mean over the last batch.",
    reduce="max",
)
QUEUE_ROWS = Metric(
    name="m3pc_planner_queue_depth", kind="gauge", help="Environments that wait for an answer."
)
PLANNER_VERSION = Metric(
    name="m3pc_planner_weights_version",
    kind="gauge",
    help="Updates of the model behind the weights in use.",
    reduce="min",
)
WEIGHTS_REJECTED = Metric(
    name="m3pc_planner_weights_rejected_total",
    kind="counter",
    help="Published weights that a planner refused to use.",
    label="reason",
    values=("missing", "size", "hash", "format", "shape", "finite", "canary", "env"),
)
PLANNER_IDLE = Metric(
    name="m3pc_planner_idle_seconds_total", kind="counter", help="Seconds without a request."
)
PLANNER_BUSY = Metric(
    name="m3pc_planner_busy_seconds_total", kind="counter", help="Seconds spent on batches."
)
OUT_OF_MEMORY = Metric(
    name="m3pc_planner_out_of_memory_total",
    kind="counter",
    help="Batches that did not fit into memory and were computed in parts.",
)

# Serve
SERVED_STEPS = Metric(
    name="m3pc_serve_steps_total",
    kind="counter",
    help="Steps of robots: answered in time, answered after their deadline, or refused.",
    label="result",
    values=("ok", "late", "refused"),
)
SERVED_SECONDS = Metric(
    name="m3pc_serve_step_duration_seconds",
    kind="histogram",
    help="Time from a robot's request to its answer.",
    buckets=SECONDS,
)
SERVED_CANDIDATES = Metric(
    name="m3pc_serve_candidates",
    kind="histogram",
    help=(
        "Candidates that the deadline left time for, of steps that were to be planned; 0 "
        "means no planning."
    ),
    buckets=(0.0, *SIZES),
)
SESSIONS = Metric(name="m3pc_serve_sessions", kind="gauge", help="Open sessions of robots.")
SERVED_EPISODES = Metric(
    name="m3pc_serve_episodes_total",
    kind="counter",
    help=(
        "Sessions that ended: closed by the robot, abandoned (idle or replaced), or dropped "
        "without a step to record."
    ),
    label="outcome",
    values=("ended", "abandoned", "dropped"),
)

# Replay
APPENDS = Metric(
    name="m3pc_replay_append_total",
    kind="counter",
    help="Appends of episodes by their result.",
    label="result",
    values=("durable", "duplicate", "gap", "fenced", "rejected", "retry later"),
)
APPEND_SECONDS = Metric(
    name="m3pc_replay_append_duration_seconds",
    kind="histogram",
    help="Time until an append was answered.",
    buckets=SECONDS,
)
COMMIT_SECONDS = Metric(
    name="m3pc_replay_commit_duration_seconds",
    kind="histogram",
    help="Time to write and sync one group of appends.",
    buckets=SECONDS,
)
INSERTED = Metric(
    name="m3pc_replay_inserted_transitions_total",
    kind="counter",
    help="Steps appended to the store.",
)
REPLAY_STEPS = Metric(name="m3pc_replay_transitions", kind="gauge", help="Steps in the store.")
REPLAY_BYTES = Metric(name="m3pc_replay_bytes", kind="gauge", help="Bytes of the store on disk.")
DISK_FREE = Metric(
    name="m3pc_replay_disk_free_bytes",
    kind="gauge",
    help="Free bytes on the disk of the store.",
    reduce="min",
)
SEGMENTS = Metric(
    name="m3pc_replay_segments",
    kind="gauge",
    help="Segment files: in use, and set aside because they are damaged.",
    label="state",
    values=("sealed", "quarantined"),
)
TORN_BYTES = Metric(
    name="m3pc_replay_torn_bytes_total",
    kind="counter",
    help=(
        "Bytes that were cut off when the store was opened: appends that a crash left unfinished."
    ),
)
RECOVERY_SECONDS = Metric(
    name="m3pc_replay_recovery_duration_seconds",
    kind="gauge",
    help="Time that it took to open the store.",
)
LIMITER_ERROR = Metric(
    name="m3pc_replay_limiter_error",
    kind="gauge",
    help="Updates that the learner still owes for the collected data; below 0 it is ahead.",
)
WRITER_BLOCKED = Metric(
    name="m3pc_replay_writer_blocked", kind="gauge", help="1 while appends wait for the learner."
)

# Learner
UPDATES_DONE = Metric(
    name="m3pc_learner_updates_total", kind="counter", help="Updates of the trajectory model."
)
CRITIC_UPDATES = Metric(
    name="m3pc_learner_critic_updates_total", kind="counter", help="Updates of the critic."
)
UPDATE_SECONDS = Metric(
    name="m3pc_learner_update_duration_seconds",
    kind="histogram",
    help="Duration of one update of the model, with the critic's updates that belong to it.",
    buckets=SECONDS,
)
LEARNER_WAIT = Metric(
    name="m3pc_learner_wait_seconds_total",
    kind="counter",
    help="Seconds in which the learner could not work, by what it waited for.",
    label="on",
    values=("limiter", "batch", "disk"),
)
LOSS = Metric(
    name="m3pc_learner_loss",
    kind="gauge",
    help="Losses of the last update.",
    label="name",
    values=("states", "actions", "rewards", "returns", "nll", "value_loss", "q_loss"),
)
COLLECTED_SHARE = Metric(
    name="m3pc_learner_collected_ratio",
    kind="gauge",
    help="Fraction of the model's training data that was collected online; the rest was logged.",
)
ENTROPY = Metric(name="m3pc_learner_entropy", kind="gauge", help="Entropy of the policy in nats.")
ALPHA = Metric(
    name="m3pc_learner_alpha", kind="gauge", help="Multiplier of the entropy constraint."
)
GRADIENT_NORM = Metric(
    name="m3pc_learner_grad_norm",
    kind="gauge",
    help="Norm of the model's gradient before clipping.",
)
NONFINITE_UPDATES = Metric(
    name="m3pc_learner_nonfinite_updates_total",
    kind="counter",
    help="Updates that were skipped because a loss or gradient was not finite.",
)
VALUES = Metric(
    name="m3pc_learner_value",
    kind="gauge",
    help=(
        "Means over steps of collected episodes: Q, V, and the discounted return that "
        "followed (seen). Q - seen is the bias of Q."
    ),
    label="of",
    values=("q", "v", "seen"),
)
ENTROPY_BOUND = Metric(
    name="m3pc_learner_entropy_bound", kind="gauge", help="Lower bound of the policy's entropy."
)
ROLLBACKS = Metric(
    name="m3pc_learner_rollbacks_total",
    kind="counter",
    help="Returns to the last checkpoint after training diverged.",
)
PUBLISHED = Metric(
    name="m3pc_learner_published_total",
    kind="counter",
    help="Versions of the weights that were offered to the coordinator.",
    label="result",
    values=("ok", "stale", "fenced", "unavailable"),
)
LAST_PUBLISHED = Metric(
    name="m3pc_learner_published_timestamp_seconds",
    kind="gauge",
    help="Unix time of the last version that planners can find.",
    reduce="max",
)
LAST_UPDATE = Metric(
    name="m3pc_learner_last_update_timestamp_seconds",
    kind="gauge",
    help="Unix time of the last update.",
    reduce="max",
)

# Checkpoints
CHECKPOINT_SECONDS = Metric(
    name="m3pc_checkpoint_duration_seconds",
    kind="histogram",
    help="Time to write a checkpoint.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
LAST_CHECKPOINT = Metric(
    name="m3pc_checkpoint_last_success_timestamp_seconds",
    kind="gauge",
    help="Unix time of the last checkpoint.",
    reduce="max",
)
CHECKPOINT_BYTES = Metric(
    name="m3pc_checkpoint_bytes", kind="gauge", help="Size of the last checkpoint."
)
CHECKPOINT_FAILURES = Metric(
    name="m3pc_checkpoint_failures_total",
    kind="counter",
    help="Checkpoints that could not be written.",
)
CHECKPOINTS_PASSED_OVER = Metric(
    name="m3pc_checkpoint_passed_over_total",
    kind="counter",
    help="Damaged checkpoints that a starting learner skipped for an older one.",
)

# Coordinator
COORDINATOR_FAILURES = Metric(
    name="m3pc_coordinator_failures_total",
    kind="counter",
    help="Calls that the coordinator did not answer; the caller went on without it.",
)

# Exporter
DROPPED_SERIES = Metric(
    name="m3pc_exporter_dropped_series_total",
    kind="counter",
    help="Series left out of a scrape because there were too many.",
)
