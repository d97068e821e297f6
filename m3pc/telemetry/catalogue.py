"""All metrics of M³PC. Names are part of its interface: dashboards and alerts are built on them."""

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
    help="1 for what the run does now.",
    label="phase",
    values=PHASES,
)
RUN_STEPS = Metric(
    name="m3pc_run_steps", kind="gauge", help="Environment steps stored, of all drivers so far."
)
RUN_STEPS_GOAL = Metric(
    name="m3pc_run_steps_goal", kind="gauge", help="Environment steps that end the run."
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
    help="Processes that there should be.",
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
    help="Processes started again.",
    label="part",
    values=PARTS,
)
SCALED = Metric(
    name="m3pc_run_scaled_total",
    kind="counter",
    help="Changes that autoscaling made to the number of actors.",
    label="direction",
    values=("up", "down"),
)
EVALUATED = Metric(
    name="m3pc_run_evaluation_return",
    kind="gauge",
    help="Mean return of the last evaluation, and its standard error.",
    label="which",
    values=("mean", "error"),
)
EVALUATED_SCORE = Metric(
    name="m3pc_run_evaluation_score", kind="gauge", help="The same mean as D4RL's score, 0 to 100."
)
EVALUATED_STEPS = Metric(
    name="m3pc_run_evaluation_steps",
    kind="gauge",
    help="Environment steps that the run had at its last evaluation.",
)

# Actors
ACTOR_UP = Metric(
    name="m3pc_actor_up",
    kind="gauge",
    help="1 while the actor in a slot collects, of the first 256 slots.",
    label=SLOT,
)
RECENT_RETURN = Metric(
    name="m3pc_actor_recent_return",
    kind="gauge",
    help="Of the last 50 episodes collected that were not cut short.",
    label="which",
    values=("mean", "best", "worst"),
)
PLAN_RETURN = Metric(
    name="m3pc_actor_plan_return",
    kind="gauge",
    help="Of the last 50 whole episodes: what planning expected at the first step, and what came of"
    " it, by the critic's discount where a critic guides and without any where returns do.",
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
    help="Environments that misbehaved and were made anew.",
    label="reason",
    values=("nan", "crash", "timeout", "shape"),
)
UNACKED = Metric(
    name="m3pc_actor_unacked_episodes", kind="gauge", help="Episodes that wait for the store."
)
ACTOR_BLOCKED = Metric(
    name="m3pc_actor_blocked_seconds_total",
    kind="counter",
    help="Time in which an actor could not step its environments.",
    label="on",
    values=("planner", "replay", "stale"),
)
ACTOR_STEPPING = Metric(
    name="m3pc_actor_stepping_seconds_total", kind="counter", help="Time inside environments."
)
STALENESS = Metric(
    name="m3pc_actor_policy_staleness_updates",
    kind="histogram",
    help="Updates that the learner was ahead of an episode's policy, when it saw the episode.",
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
    help="Of requests: waiting in the queue, being computed, both.",
    label="stage",
    values=("queue", "compute", "total"),
    buckets=SECONDS,
)
BATCH_ROWS = Metric(
    name="m3pc_planner_batch_size",
    kind="histogram",
    help="Environments answered together.",
    buckets=SIZES,
)
EFFECTIVE = Metric(
    name="m3pc_planner_effective_candidates",
    kind="histogram",
    help="Candidates that had a say, 1 / sum of squared weights; mean of each request.",
    buckets=SIZES,
)
SPREAD = Metric(
    name="m3pc_planner_utility_spread",
    kind="gauge",
    help="Standard deviation of utilities over candidates, mean of the last batch.",
    reduce="max",
)
QUEUE_ROWS = Metric(
    name="m3pc_planner_queue_depth", kind="gauge", help="Environments that wait for an answer."
)
PLANNER_VERSION = Metric(
    name="m3pc_planner_weights_version",
    kind="gauge",
    help="Updates behind the weights that answer.",
    reduce="min",
)
WEIGHTS_REJECTED = Metric(
    name="m3pc_planner_weights_rejected_total",
    kind="counter",
    help="Published weights that were not taken.",
    label="reason",
    values=("missing", "size", "hash", "format", "shape", "finite", "canary", "env"),
)
PLANNER_IDLE = Metric(
    name="m3pc_planner_idle_seconds_total", kind="counter", help="Time without a request."
)
PLANNER_BUSY = Metric(
    name="m3pc_planner_busy_seconds_total", kind="counter", help="Time spent on batches."
)
OUT_OF_MEMORY = Metric(
    name="m3pc_planner_out_of_memory_total",
    kind="counter",
    help="Batches that did not fit into memory and were computed in parts.",
)

# Serve
SERVED = Metric(
    name="m3pc_serve_steps_total",
    kind="counter",
    help="Steps of robots answered: in time, after their deadline, or not at all.",
    label="result",
    values=("ok", "late", "refused"),
)
SERVED_SECONDS = Metric(
    name="m3pc_serve_step_duration_seconds",
    kind="histogram",
    help="From a robot's request to its answer.",
    buckets=SECONDS,
)
SERVED_CANDIDATES = Metric(
    name="m3pc_serve_candidates",
    kind="histogram",
    help="Candidates that there was time for, of steps that were to be planned; 0: none.",
    buckets=(0.0, *SIZES),
)
SESSIONS = Metric(name="m3pc_serve_sessions", kind="gauge", help="Robots that have a session.")
SERVED_EPISODES = Metric(
    name="m3pc_serve_episodes_total",
    kind="counter",
    help="Sessions that ended: by the robot, by being idle or replaced, without a step to keep.",
    label="outcome",
    values=("ended", "abandoned", "dropped"),
)

# Replay
APPENDS = Metric(
    name="m3pc_replay_append_total",
    kind="counter",
    help="Appends by what became of them.",
    label="result",
    values=("durable", "duplicate", "gap", "fenced", "rejected", "retry later"),
)
APPEND_SECONDS = Metric(
    name="m3pc_replay_append_duration_seconds",
    kind="histogram",
    help="Until an append was answered.",
    buckets=SECONDS,
)
COMMIT_SECONDS = Metric(
    name="m3pc_replay_commit_duration_seconds",
    kind="histogram",
    help="Of writing and syncing what was appended together.",
    buckets=SECONDS,
)
INSERTED = Metric(
    name="m3pc_replay_inserted_transitions_total", kind="counter", help="Steps appended."
)
REPLAY_STEPS = Metric(name="m3pc_replay_transitions", kind="gauge", help="Steps in the store.")
REPLAY_BYTES = Metric(name="m3pc_replay_bytes", kind="gauge", help="Bytes of the store.")
DISK_FREE = Metric(
    name="m3pc_replay_disk_free_bytes", kind="gauge", help="Free beside the store.", reduce="min"
)
SEGMENTS = Metric(
    name="m3pc_replay_segments",
    kind="gauge",
    help="Segments that are read, and those set aside because they were damaged.",
    label="state",
    values=("sealed", "quarantined"),
)
TORN_BYTES = Metric(
    name="m3pc_replay_torn_bytes_total",
    kind="counter",
    help="Cut off when the store was opened: appends that a crash left unfinished.",
)
RECOVERY_SECONDS = Metric(
    name="m3pc_replay_recovery_duration_seconds",
    kind="gauge",
    help="Of opening the store, the last time.",
)
LIMITER_ERROR = Metric(
    name="m3pc_replay_limiter_error",
    kind="gauge",
    help="Updates owed by the learner; below 0: that it is ahead.",
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
    help="Of one update of the model with the critic's that go with it.",
    buckets=SECONDS,
)
LEARNER_WAIT = Metric(
    name="m3pc_learner_wait_seconds_total",
    kind="counter",
    help="Time in which the learner could not work.",
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
    help="Collected part of what the model learns from; the rest was logged.",
)
ENTROPY = Metric(name="m3pc_learner_entropy", kind="gauge", help="Entropy of the policy.")
ALPHA = Metric(name="m3pc_learner_alpha", kind="gauge", help="Multiplier of the entropy's bound.")
GRADIENT = Metric(name="m3pc_learner_grad_norm", kind="gauge", help="Before it is clipped.")
NONFINITE = Metric(
    name="m3pc_learner_nonfinite_updates_total",
    kind="counter",
    help="Updates left out: a loss or gradient was not finite.",
)
VALUES = Metric(
    name="m3pc_learner_value",
    kind="gauge",
    help="On steps of collected episodes: Q, V, and the discounted return seen. Q - seen is Q's"
    " bias.",
    label="of",
    values=("q", "v", "seen"),
)
ENTROPY_BOUND = Metric(
    name="m3pc_learner_entropy_bound", kind="gauge", help="Least entropy that the policy may have."
)
ROLLBACKS = Metric(
    name="m3pc_learner_rollbacks_total", kind="counter", help="Returns to the last checkpoint."
)
PUBLISHED = Metric(
    name="m3pc_learner_published_total",
    kind="counter",
    help="Versions offered.",
    label="result",
    values=("ok", "stale", "fenced", "unavailable"),
)
LAST_PUBLISHED = Metric(
    name="m3pc_learner_published_timestamp_seconds",
    kind="gauge",
    help="Of the last version that planners can find.",
    reduce="max",
)
LAST_UPDATE = Metric(
    name="m3pc_learner_last_update_timestamp_seconds", kind="gauge", help="Of the last update.",
    reduce="max",
)  # fmt: skip

# Checkpoints
CHECKPOINT_SECONDS = Metric(
    name="m3pc_checkpoint_duration_seconds",
    kind="histogram",
    help="Of writing a checkpoint.",
    buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
LAST_CHECKPOINT = Metric(
    name="m3pc_checkpoint_last_success_timestamp_seconds",
    kind="gauge",
    help="Of the last checkpoint written.",
    reduce="max",
)
CHECKPOINT_BYTES = Metric(
    name="m3pc_checkpoint_bytes", kind="gauge", help="Of the last checkpoint written."
)
CHECKPOINT_FAILURES = Metric(
    name="m3pc_checkpoint_failures_total",
    kind="counter",
    help="Checkpoints that could not be written.",
)
PASSED_OVER = Metric(
    name="m3pc_checkpoint_passed_over_total",
    kind="counter",
    help="Damaged checkpoints that a learner passed over at its start for one before them.",
)

# Coordinator
COORDINATOR_DOWN = Metric(
    name="m3pc_coordinator_failures_total",
    kind="counter",
    help="Calls that the coordinator did not answer; the caller went on without.",
)

# Exporter
DROPPED_SERIES = Metric(
    name="m3pc_exporter_dropped_series_total",
    kind="counter",
    help="Series left out of an answer because there were too many.",
)
