"""The typed schema behind conf/: every key, its type, its default and what it means.

Defaults live here and nowhere else; the YAML files of conf/ set only what differs. Loading is in `sao.config_load`; this module imports no
torch, vllm, ray or hydra, so that `sao --help` is instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunConfig:
    """Where a run lives and how long it is."""

    name: str = "run"
    dir: str = ""  # the run folder; empty: runs/<name>-<date>-<time>
    phase: str = "rl"  # rl | critic (fit the critic on rollouts of the frozen policy)
    dry_run: bool = False  # check everything, print the plan, start nothing
    progress: str = "auto"  # auto | rich | plain


@dataclass
class TrainConfig:
    steps: int = 100  # actor optimiser steps
    batch_size: int = 128  # trajectories of one optimiser step (paper: 128)


@dataclass
class CheckpointConfig:
    """What survives a crash. `sao train resume=RUN` goes on from the newest complete checkpoint."""

    every: int = 20  # training steps between checkpoints; 0: only when the run ends or is stopped
    keep: int = 2  # newest checkpoints kept


@dataclass
class AlgoConfig:
    """SAO (arXiv 2607.07508). Comments name the alternatives; defaults are the paper's or ours where it is silent."""

    name: str = "sao"  # what the report calls it
    loss: str = "dis"  # dis | reinforce | ppo_clip | tis | icepop | vapo | package.module:function
    loss_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of a loss other than dis
    advantage: str = "gae"  # gae (the critic's) | group | running_mean | batch_mean | outcome | package.module:function
    advantage_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of an advantage other than gae
    eps_low: float = 0.3  # of dis: epsilons, not bounds; ratios in (1 - eps_low, 1 + eps_high) count
    eps_high: float = 5.0
    detach_ratio: bool = True  # false: differentiate f(r) too (the literal reading; reverses the sign where p < 1/e)
    denominator: str = "all"  # all | accepted: which action tokens of the whole batch divide the policy loss
    gamma: float = 1.0
    lambda_critic: float = 1.0
    lambda_policy: float | None = None  # null: length-adaptive, 1 - 1/(alpha * l)
    alpha: float = 1.5
    lambda_length: str = "tokens"  # tokens | turns: what l counts
    skip_observation: bool = True  # false: ordinary GAE over every position between first and last action
    value_level: str = "token"  # token | step_mean | step_last (rejected variants of the paper's appendix)
    values: str = "after"  # after | before: read values with the critic after or before this batch's critic steps
    whiten: str = "auto"  # auto | on | off
    whiten_until_ev: float = 0.4  # auto: on until explained variance has exceeded this ...
    whiten_patience: int = 20  # ... for so many steps in a row
    truncation: str = "terminal"  # terminal | bootstrap | drop
    kl_coef: float = 0.0  # weight of KL(policy || initial policy), estimator k3
    entropy_coef: float = 0.0


@dataclass
class ModelConfig:
    path: str = ""  # local Hugging Face directory or hub id; empty: made by `factory`
    factory: str = ""  # package.module:function(directory, seed, **factory_args) that makes a model directory without downloads
    factory_args: dict[str, Any] = field(default_factory=dict)
    cache_dir: str = ""  # where the factory's model is kept for later runs; empty: made anew for every run
    warmstart: bool = False  # start from the cached `sao warmstart` checkpoint of this model and environment
    dtype: str = "float32"  # float32 | bfloat16: of the trained weights
    autocast: bool = False  # bf16 autocast in the learner
    renderer: str = "chatml"
    reasoning: str = "keep"  # keep | template: what happens to earlier turns' reasoning (template: a new segment)
    trust_remote_code: bool = False


@dataclass
class CriticConfig:
    updates: int = 2  # K optimiser steps per actor step
    freeze: list[str] = field(default_factory=lambda: [r"\.(self_attn|linear_attn)\."])  # regular expressions on parameter names; empty: none
    head_init: str = "zero"  # zero | normal
    critic_only_steps: int = 10  # first steps with the actor frozen
    trust_above: float = 0.1  # screen and report warn of the critic until the median explained variance of five steps is above this
    path: str = ""  # start from this critic (for instance of `run.phase=critic`) instead of the policy's weights


@dataclass
class EngineConfig:
    replicas: int = 1
    dtype: str = "float32"
    max_model_len: int = 0  # 0: the model's own limit
    max_num_seqs: int = 64
    kv_cache_mb: int = 128  # KV memory of one replica on CPU
    gpu_memory_utilization: float = 0.6  # share of a GPU one replica may take
    tensor_parallel_size: int = 1
    enforce_eager: bool = True
    prefix_caching: bool = True
    block_size: int = 0  # tokens of one KV block, the unit in which a prefix is cached; 0: vLLM's choice (128 on CPU)
    threads: int = 1  # CPU threads of one replica
    # Shortest time from one engine step to the next. Requests that arrive meanwhile share the step, which leaves cores to others when a step of a
    # tiny model costs more in Python than in arithmetic.
    step_interval_ms: float = 0.0
    start_timeout_s: float = 300.0
    request_timeout_s: float = 120.0
    # An engine that has been at one step for so long hangs and is replaced. Raise it where a step is that slow: long prompts, few cores, a big model.
    stall_s: float = 60.0
    canary_tolerance: float = 0.005  # largest |engine - trainer| log-prob after a publication; use 0.5 for bfloat16


@dataclass
class WeightsConfig:
    publish_every: int = 1  # actor steps between publications; needs rollout.staleness >= publish_every - 1
    kv_on_publish: str = "keep"  # keep | recompute: KV of requests in flight
    reset_optimizer: bool = False  # clear the policy optimiser's state at each publication (GLM-5)


@dataclass
class SamplingConfig:
    """The training distribution. Anything but the raw softmax breaks the ratio and is refused for training."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass
class RolloutConfig:
    staleness: int = 4  # tau: actor steps a trajectory may lag; kept at equality. 0: synchronous
    overdue: str = "wait"  # wait | drop
    rollouts_per_prompt: int = 1  # SAO uses one; n: groups of n, trained whole, for algo.advantage=group
    workers: int = 1  # episode worker actors
    max_running: int = 0  # most episodes running at once; 0: as many as the staleness rules admit
    retries: int = 1  # fresh attempts after an environment or infrastructure failure
    time_limit_s: float = 60.0  # of one episode
    max_turns: int = 8
    max_turn_tokens: int = 256
    max_tokens: int = 2048  # of a whole episode, prompt included
    observation_limit: int = 4096  # characters of one environment message; longer is cut with a marker
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class SandboxConfig:
    """Where an environment's commands run (docs/how-to/sandbox.md). Only environments that ask for a sandbox have one: `sandbox = True` in the class."""

    backend: str = "bwrap"  # bwrap | landlock (weaker, and says how) | docker | podman | subprocess (no protection: needs unsafe=true)
    unsafe: bool = False  # allow backend=subprocess
    network: bool = False  # true: the machine's own, with everything that listens on it
    memory_mb: int = 1024  # of all processes of a sandbox together
    disk_mb: int = 256  # of all it can write, /tmp and /dev/shm included; held in memory
    processes: int = 64  # at once, threads included
    cpu_s: int = 60  # of one process
    timeout_s: float = 30.0  # of one command
    output_kb: int = 64  # kept of what one command prints: the beginning and the end
    read_only: list[str] = field(default_factory=list)  # further host paths it may read, under the same path
    image: str = ""  # of docker and podman


@dataclass
class EnvConfig:
    name: str = "single_turn"
    target: str = "sao.envs.single_turn.environment:SingleTurnEnvironment"  # package.module:Class
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the class
    workload: str = "default"
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    data_path: str = ""  # tasks of this environment, for mixtures; empty: data.path
    eval_path: str = ""  # its held-out tasks; empty: data.eval_path where data.path is its task file


@dataclass
class PhaseConfig:
    """A stretch of a stream in which one thing is rewarded."""

    name: str = ""
    start: int = 0  # position in the stream, in prompts; with drift=recurring left out, the period decides
    args: dict[str, Any] = field(default_factory=dict)  # over env.args while the phase lasts, for the environment's generator of tasks


@dataclass
class OnlineConfig:
    """A stream that changes without notice (`sao online`), and what guards the policy that serves meanwhile. Off by default."""

    phases: list[PhaseConfig] = field(default_factory=list)  # in order; the first at 0. Empty: no stream
    drift: str = "abrupt"  # abrupt | gradual | recurring
    ramp: int = 0  # gradual: prompts over which a new phase's share rises from 0 to 1
    period: int = 0  # recurring: prompts of each phase before the next; the phases come round in order
    # Shadow evaluation: new weights go to borrowed engines first and serve only if their held-out mean is not this much below that of the
    # weights that serve. Else they are refused, and the learner goes back. 0: off.
    shadow_drop: float = 0.0
    shadow_tasks: int = 32  # held-out tasks of a shadow evaluation
    # Roll-back: when the mean of the last rewards has fallen this much below its best, the learner goes back to the last good version. 0: off.
    rollback_fall: float = 0.0
    rollback_window: int = 128  # rewards of that mean, and rewards by which a version proves good


@dataclass
class DataConfig:
    path: str = ""  # .jsonl, .parquet, a datasets directory or hub id; empty: the environment's own generator
    eval_path: str = ""  # held-out tasks; empty: the generator's held-out split, or none
    split: str = "train"  # of a datasets source
    prompt_column: str = "prompt"
    max_prompt_chars: int = 200_000
    shuffle: bool = True
    pool: int = 0  # only the first N tasks are drawn, over and over; 0: all
    mixture: dict[str, float] = field(default_factory=dict)  # conf/env name -> weight; empty: `env` alone
    # Environments of the mixture that differ from their file: name -> keys of `env` over those of conf/env/<name>.yaml, or of the file that `base` names.
    variants: dict[str, Any] = field(default_factory=dict)
    # What was lately earned decides what comes next: off | learnable (sometimes solved) | frontier (the hardest level that is in reach) | package.module:Class
    curriculum: str = "off"
    curriculum_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the strategy
    curriculum_floor: float = 0.1  # share of the draws that goes to all tasks or levels alike
    curriculum_recent: int = 0  # rewards of a task or level that count as recent; 0: 4 of a single task, 64 of a level
    curriculum_column: str = ""  # column of the rows that holds their level; empty: every row by itself


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_ratio: float = 0.0  # share of the steps over which the rate rises to lr
    schedule: str = "constant"  # constant | linear | cosine, to lr * final_lr_ratio at train.steps
    final_lr_ratio: float = 0.1


def _critic_optimizer() -> OptimizerConfig:
    return OptimizerConfig(lr=5e-6, grad_clip=10.0)


@dataclass
class OptimConfig:
    policy: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: OptimizerConfig = field(default_factory=_critic_optimizer)


@dataclass
class LearnerConfig:
    tokens_per_micro_batch: int = 8192
    threads: int = 1
    attention: str = "packed_sdpa"  # packed_sdpa | any attention of transformers that takes cu_seq_lens (flash_attention_2)
    sharing: str = "off"  # off | packed: samples of a micro-batch compute the prefix they share once
    device: str = "auto"  # auto | cpu | cuda
    timeout_s: float = 1800.0  # of one step


@dataclass
class RewardConfig:
    function: str = ""  # package.module:function, for env=single_turn
    mode: str = "auto"  # auto | async | process: async callables run in the worker, others in killable processes
    timeout_s: float = 10.0
    processes: int = 1


@dataclass
class EvalConfig:
    at_start: bool = False
    at_end: bool = False
    every: int = 0  # versions between evaluations while training; 0: none
    placement: str = "hold"  # hold: the next publication waits for an evaluation | replica: one engine leaves the training pool for it
    tasks: int = 256  # held-out tasks
    samples: int = 1  # episodes per held-out task; 1 at temperature 0, where they would all be the same
    temperatures: list[float] = field(default_factory=lambda: [1.0, 0.0])


@dataclass
class LoggerConfig:
    wandb: str = "offline"  # offline | online | disabled
    wandb_project: str = "sao"
    trajectories: str = "all"  # all | none: the Parquet record of every trained trajectory
    report: bool = True


@dataclass
class LauncherConfig:
    ray_address: str = ""  # empty: a Ray of our own on this machine
    num_cpus: float = 0.0  # 0: what the machine has
    object_store_mb: int = 0  # Ray's shared memory; 0: room for two copies of the published weights
    oversubscribe: bool = False  # allow more threads of engines and learner than there are cores
    silence_s: float = 20.0  # an actor that gives no sign of life for so long is ended and replaced
    # How often in a row an actor may be lost before the run gives up: a worker with no episode done between, the learner with no step, an engine within
    # 20 s of its start.
    restarts: int = 5


@dataclass
class WarmstartConfig:
    """`sao warmstart`: supervised learning on the environment's demonstrations."""

    steps: int = 900
    batch_size: int = 40
    lr: float = 4e-3  # embeddings, norms, head (AdamW)
    matrix_lr: float = 0.02  # hidden matrices (Muon); 0: AdamW for all
    clean_share: float = 0.7  # first share of the steps on clean demonstrations, the rest on the mixture
    seed: int = 0
    cache_dir: str = ""  # empty: ~/.cache/sao/warmstart


@dataclass
class Config:
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)
