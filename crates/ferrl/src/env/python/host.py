

class Refused(Exception):
    """The file or package cannot be used as an environment."""


class Broken(Exception):
    """An answer of the environment that is no turn."""


class Chance:
    """The process-wide random generators as one episode left them: episodes that take turns in a process draw as alone."""

    def __init__(self, seed):
        self.seed, self.states = seed, None

    def enter(self):
        import random

        numpy = sys.modules.get("numpy")
        if self.states is None:
            random.seed(self.seed)
            if numpy is not None:
                numpy.random.seed(self.seed % (1 << 32))
            return
        random.setstate(self.states[0])
        if numpy is not None:
            if self.states[1] is None:
                numpy.random.seed(self.seed % (1 << 32))
            else:
                numpy.random.set_state(self.states[1])

    def leave(self):
        import random

        numpy = sys.modules.get("numpy")
        self.states = random.getstate(), numpy.random.get_state() if numpy is not None else None


class Interleaved:
    """A coroutine whose every stretch between two waits runs with its episode's random generators."""

    def __init__(self, coroutine, chance):
        self.inner, self.chance = coroutine, chance

    def __await__(self):
        steps, value, error = self.inner.__await__(), None, None
        while True:
            self.chance.enter()
            try:
                waits = steps.throw(error) if error is not None else steps.send(value)
            except StopIteration as end:
                return end.value
            finally:
                self.chance.leave()
            value = error = None
            try:
                value = yield waits
            except BaseException as thrown:
                error = thrown


def finite(value, name):
    import math

    if value is None or isinstance(value, (str, bytes)):
        raise Broken(f"{name} is {value!r:.40}, expected a number")
    try:
        value = float(value)
    except (TypeError, ValueError, OverflowError):
        raise Broken(f"{name} is {type(value).__name__} {value!r:.40}, expected a number") from None
    if not math.isfinite(value):
        raise Broken(f"{name} is {value}, expected a finite number")
    return value


def truth(value, name):
    """A bool, a number or what a library has for one; the text "False" would count as true."""
    if value is None or isinstance(value, (str, bytes, list, tuple, dict, set)):
        raise Broken(f"{name} is {type(value).__name__} {value!r:.40}, expected True or False")
    return bool(value)


def text(value, name):
    if not isinstance(value, str):
        raise Broken(f"{name} is {type(value).__name__} {value!r:.40}, expected text")
    return value


def words(value):
    """What may be written as JSON of a dict; None for anything else."""
    return {str(k): plain(v) for k, v in value.items()} if isinstance(value, dict) else None


def takes(function):
    """How many arguments a function can be given by position."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 99
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def needs(function):
    """How many arguments without a default a function has."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


async def done(result):
    import inspect

    return await result if inspect.isawaitable(result) else result


class StepFile:
    """RL2's `step(state, action, extra_info)` with an optional `reset`, or its later `env_step(sample)`."""

    kind = "state"

    def __init__(self, module):
        self.module = module
        self.later = not callable(getattr(module, "step", None))
        self.function = later_step(module) if self.later else module.step
        import inspect

        self.concurrent = inspect.iscoroutinefunction(self.function)

    async def open(self, episode, request):
        import copy

        episode.row = request.get("row") or {}
        episode.info = copy.deepcopy(episode.row.get("extra_info"))
        if episode.info is None:
            episode.info = {}
        if isinstance(episode.info, dict) and request.get("number") is not None:
            episode.info.setdefault("idx", request["number"])
        episode.turn = 0
        episode.state = request.get("state")
        if not episode.state:
            reset = getattr(self.module, "reset", None)
            if not callable(reset):
                raise Broken("the row has no prompt and the file has no reset(extra_info)")
            state = await done(reset(episode.info) if takes(reset) else reset())
            if isinstance(state, tuple) and len(state) == 2:
                state, episode.info = state
            episode.state = text(state, "the text of reset")
        return episode.state

    async def step(self, episode, action):
        if self.later:
            import types

            sample = types.SimpleNamespace(
                state_text=episode.state, action_text=action, turn=episode.turn, sample=episode.row
            )
            result = await done(self.function(sample))
        else:
            result = await done(self.function(episode.state, action, episode.info))
        episode.turn += 1
        if not isinstance(result, dict):
            name = "env_step" if self.later else "step"
            raise Broken(f"{name} returned {type(result).__name__}, expected a dict with next_state, reward, done")
        missing = [key for key in ("reward", "done") if key not in result]
        if not missing and not truth(result["done"], "done") and result.get("next_state") is None:
            missing = ["next_state"]
        if missing:
            raise Broken(f"the answer has no {' and no '.join(missing)}; it has {', '.join(map(str, result)) or 'nothing'}")
        over = truth(result["done"], "done")
        episode.info = result.get("extra_info", episode.info)
        following = result.get("next_state")
        episode.state = text(following, "next_state") if not over or following is not None else ""
        score = result.get("score")
        return {
            "next": episode.state,
            "reward": finite(result["reward"], "reward"),
            "score": None if score is None else finite(score, "score"),
            "terminated": over,
            "truncated": False,
            "extra": words(episode.info) or {},
        }


class Steps:
    """What classes with `reset` and a `step` of five values have in common: observations follow each other."""

    kind, concurrent = "observation", False

    async def open(self, episode, request):
        episode.env = self.make()
        state = await done(self.reset(episode.env, request))
        info = {}
        if isinstance(state, tuple) and len(state) == 2:
            state, info = state
        return self.whole(text(state, "the observation of reset"), info)

    async def step(self, episode, action):
        result = await done(episode.env.step(action))
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            what = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise Broken(f"step returned {what}, expected (observation, reward, terminated, truncated, info)")
        if len(result) == 4:  # before gymnasium
            observation, reward, terminated, info = result
            truncated = bool(isinstance(info, dict) and info.get("TimeLimit.truncated"))
            terminated = truth(terminated, "terminated") and not truncated
        else:
            observation, reward, terminated, truncated, info = result
        info = info if isinstance(info, dict) else {}
        terminated, truncated = truth(terminated, "terminated"), truth(truncated, "truncated")
        over = terminated or truncated
        observation = "" if observation is None and over else text(observation, "the observation")
        score = info.get("score", info.get("success"))
        return {
            "next": observation if over else self.whole(observation, info),
            "reward": finite(reward, "reward"),
            "score": None if score is None else finite(score, "score"),
            "terminated": terminated,
            "truncated": truncated,
            "extra": words(info) or {},
        }

    def whole(self, observation, info):
        """GEM writes what is asked for after the observation, on a line of its own."""
        suffix = info.get("suffix") if isinstance(info, dict) else None
        if not isinstance(suffix, str) or not suffix:
            return observation
        return observation + ("" if observation[-1:].isspace() else "\n") + suffix


class GymClass(Steps):
    """A class of the user's file with gymnasium's methods."""

    def __init__(self, made, options):
        import inspect

        self.made, self.options = made, options
        self.concurrent = inspect.iscoroutinefunction(made.step)

    def make(self):
        return self.made(**self.options)

    def reset(self, env, request):
        import inspect

        try:
            known = inspect.signature(env.reset).parameters
            known = None if any(p.kind is p.VAR_KEYWORD for p in known.values()) else known
        except (TypeError, ValueError):
            known = None
        given = {"seed": request["seed"] % (1 << 31), "options": request.get("row")}
        return env.reset(**{k: v for k, v in given.items() if known is None or k in known})


class Gem(Steps):
    """An environment of GEM."""

    def __init__(self, name, options):
        self.name, self.options = name, options
        try:
            import gem
        except ImportError as missing:
            raise Refused(f"the package gem is not installed for {sys.executable} ({missing}); pip install gem-llm") from None
        self.gem = gem
        try:
            self.make()
        except Exception as error:
            raise Refused(f"gem.make({name!r}) failed: {type(error).__name__}: {error}") from None

    def make(self):
        return self.gem.make(self.name, **self.options)

    def reset(self, env, request):
        return env.reset(seed=request["seed"] % (1 << 31))


class ReasoningGym:
    """A task of reasoning-gym: a question, and its own scorer for the answer."""

    kind, concurrent = "observation", False

    def __init__(self, name, options):
        try:
            import reasoning_gym
        except ImportError as missing:
            raise Refused(
                f"the package reasoning_gym is not installed for {sys.executable} ({missing}); pip install reasoning-gym"
            ) from None
        self.make = lambda seed: reasoning_gym.create_dataset(name, size=1, seed=seed, **options)
        try:
            self.make(0)
        except Exception as error:
            raise Refused(f"create_dataset({name!r}) failed: {type(error).__name__}: {error}") from None

    async def open(self, episode, request):
        episode.data = self.make(request["seed"] % (1 << 31))
        episode.entry = episode.data[0]
        return text(episode.entry["question"], "the question")

    async def step(self, episode, action):
        start, close = action.rfind("<answer>"), action.rfind("</answer>")
        answer = action[start + len("<answer>") : close] if 0 <= start < close else action
        reward = finite(episode.data.score_answer(answer.strip(), episode.entry), "the score")
        return {
            "next": "",
            "reward": reward,
            "score": reward,
            "terminated": True,
            "truncated": False,
            "extra": {"extracted": answer.strip()},
        }


def stand_in_for_rl2():
    """Where RL2 is not installed, its environment files still load: they import a type and RL2's rollout, which is done here."""
    import importlib.abc
    import importlib.machinery
    import types

    class Absent(type):
        def __call__(cls, *_, **__):
            raise ModuleNotFoundError(f"{cls.__name__} is RL2's, and RL2 is not installed; pip install rl-square")

    class Module(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(name, (), {})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "RL2" else None

        def create_module(self, spec):
            return Module(spec.name)

        def exec_module(self, module):
            pass

    sys.meta_path.append(Finder())  # asked last: an installed RL2 is found before


def later_step(module):
    """RL2's later `env_step(sample)`: a function of the file, or the one that its `generate` was made with."""
    made = getattr(getattr(module, "generate", None), "keywords", None) or {}
    return getattr(module, "env_step", None) or made.get("env_step_fn")


def environment(start):
    """What the start request asks for."""
    options = start.get("options") or {}
    if start["kind"] == "gem":
        return Gem(start["name"], options)
    if start["kind"] == "reasoning_gym":
        return ReasoningGym(start["name"], options)
    stand_in_for_rl2()
    module = load(start["file"])
    file = os.path.basename(start["file"])
    classes = [n for n, c in vars(module).items() if isinstance(c, type) and callable(getattr(c, "step", None)) and c.__module__ == module.__name__]
    name = start.get("name")
    if name:
        made = getattr(module, name, None)
        if not isinstance(made, type):
            raise Refused(f"{file} has no class {name!r}; it has {', '.join(classes) or 'none with a step'}")
        missing = [m for m in ("reset", "step") if not callable(getattr(made, m, None))]
        if missing:
            raise Refused(f"the class {name} of {file} has no {' and no '.join(missing)}")
        return GymClass(made, options)
    if callable(getattr(module, "step", None)):
        return StepFile(module)
    if callable(later_step(module)):
        if needs(later_step(module)) > 1:
            raise Refused(
                f"env_step of {file} needs {needs(later_step(module))} arguments, expected env_step(sample): sample has state_text, "
                "action_text, turn and sample, the row"
            )
        return StepFile(module)
    if len(classes) == 1:
        return GymClass(getattr(module, classes[0]), options)
    if callable(getattr(module, "generate", None)):
        raise Refused(
            f"{file} has generate(config, tokenizer, router_url, sample), which calls a server by itself; "
            "give its env_step(sample) as a function of the file"
        )
    if classes:
        raise Refused(f"{file} has several classes with a step: {', '.join(classes)}; name one as {file}:CLASS")
    raise Refused(f"{file} has no step(state, action, extra_info), no env_step(sample) and no class with reset and step")


class Episode:
    """One episode in this process."""

    def __init__(self, seed):
        self.chance = Chance(seed)


def host():
    """Plays episodes: those of an async environment at once, those of any other one call at a time."""
    import asyncio
    import json

    guard = Guard()
    start, answer = guard.start, guard.answer
    file = start.get("file") or start["kind"]
    late = guard.loading(file)
    try:
        made = environment(start)
    except Refused as why:
        return answer(start, refused=str(why))
    except BaseException:
        return answer(start, refused=guard.trace(file)["trace"])
    late.cancel()
    episodes = {}

    async def serve(request):
        key = request["episode"]
        if request["op"] == "close":
            env = getattr(episodes.pop(key, None), "env", None)
            if callable(getattr(env, "close", None)):
                env.close()
            return
        try:
            if request["op"] == "open":
                episode = episodes[key] = Episode(request["seed"])
                call = made.open(episode, request)
            else:
                episode = episodes[key]
                call = made.step(episode, request["action"])
            limit = request["timeout"] if made.concurrent else None
            result = await asyncio.wait_for(whole(Interleaved(call, episode.chance)), limit)
            fields = {"state": result} if request["op"] == "open" else {"turn": result}
        except asyncio.TimeoutError:
            fields = {"hung": True}
        except Broken as why:
            fields = {"schema": str(why)}
        except BaseException:
            fields = {"raised": guard.trace(file)}
        sys.stdout.flush()
        try:
            answer(request, **fields)
        except (TypeError, ValueError, RecursionError):
            answer(request, schema="the answer cannot be written as JSON")

    async def whole(awaitable):
        return await awaitable

    async def loop():
        inbox, here, tasks = asyncio.Queue(), asyncio.get_running_loop(), set()
        guard.listen(lambda line: here.call_soon_threadsafe(inbox.put_nowait, line))
        answer(start, ready=True, kind=made.kind, concurrent=made.concurrent)
        while True:
            request = json.loads(await inbox.get())
            if made.concurrent:
                task = asyncio.ensure_future(serve(request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                continue
            # Shortly before the deadline a hanging call shows where it hangs.
            late = guard.watch(max(request["timeout"] * 0.5, request["timeout"] - 1), file) if "timeout" in request else None
            await serve(request)
            if late:
                late.cancel()

    asyncio.run(loop())


host()
