"""Where compiled code is kept, and whose code is not run."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from torch._inductor import config

from pyro_scale.compile import cache, inductor

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="of Unix's owners and modes")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    kept = tmp_path / "with a space" / "pyro-scale"
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(kept))
    return kept


def is_for_this_process(directory):
    return directory == cache.for_this_process(os.getpid()) and directory.is_dir()


def test_what_is_kept_is_the_users_alone(kept):
    cache.write("key", b"code")
    assert cache.directory() == kept
    assert kept.stat().st_mode & 0o777 == 0o700
    (file,) = kept.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert cache.read("key") == b"code"
    assert cache.read("other") is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_directory_that_others_can_write_is_not_used(kept, mode):
    kept.mkdir(parents=True)
    kept.chmod(mode)
    assert is_for_this_process(cache.directory())


@pytest.mark.parametrize("what", ["link", "file", "another's", "relative"])
def test_a_directory_that_is_not_ones_own_is_not_used(kept, what, monkeypatch, tmp_path):
    kept.parent.mkdir()
    if what == "link":
        (tmp_path / "there").mkdir(mode=0o700)
        kept.symlink_to(tmp_path / "there")
    elif what == "file":  # as if the home could not be written
        kept.write_text("")
    elif what == "another's":
        kept.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: kept.stat().st_uid + 1)
    else:
        monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", "~/cache")
    assert is_for_this_process(cache.directory())
    assert not Path("~").exists()


@pytest.mark.parametrize("what", ["link", "writable", "another's", "pipe", "cut", "renamed"])
def test_a_file_that_anybody_else_may_have_written_is_not_read(kept, what, monkeypatch):
    cache.write("key", b"code")
    file = kept / "key.so"
    if what == "link":
        file.rename(kept / "elsewhere")
        file.symlink_to(kept / "elsewhere")
    elif what == "writable":
        file.chmod(0o620)
    elif what == "another's":
        cache.write("key", b"code")
        uid = os.geteuid()
        monkeypatch.setattr(cache, "directory", lambda: kept)
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    elif what == "pipe":  # opening it would wait for a writer
        file.unlink()
        os.mkfifo(file, 0o600)
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:  # one key's code is not another's
        file.rename(kept / "other.so")
        assert cache.read("other") is None
    assert cache.read("key") is None


def test_the_oldest_is_dropped(kept):
    limits = cache.Limits(code=3 * (1000 + 32))
    for age, key in enumerate(["a", "b", "c"]):
        cache.write(key, bytes(1000), limits)
        os.utime(kept / f"{key}.so", (age, age))
    assert cache.read("a") is not None  # and is in use again
    cache.write("d", bytes(1000), limits)
    assert [key for key in "abcd" if cache.read(key) is None] == ["b"]


def test_headers_are_dropped_among_themselves(kept):
    """However many environments have left one, code is kept; what compilers need of them stays."""
    headers = kept / "inductor" / "precompiled_headers"
    headers.mkdir(parents=True)
    for age, name in enumerate(["old", "new"]):
        headers.joinpath(f"{name}.h").write_bytes(b"0" * 50)
        headers.joinpath(f"{name}.h.gch").write_bytes(b"0" * 5000)
        os.utime(headers / f"{name}.h.gch", (age, age))
    cache.write("new", bytes(1000), cache.Limits(code=1100, headers=9000))
    assert cache.read("new") == bytes(1000)
    assert sorted(file.name for file in headers.iterdir()) == ["new.h", "new.h.gch", "old.h"]


def test_of_two_that_build_at_once_one_does(kept):
    built = []

    def build():
        if cache.read("key") is None:
            with cache.building("key"):
                if cache.read("key") is None:
                    time.sleep(0.2)
                    built.append(1)
                    cache.write("key", b"code")

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [1]
    assert [file.name for file in kept.iterdir()] == ["key.so"]


@pytest.mark.slow
def test_what_is_for_a_process_is_gone_with_it(tmp_path):
    code = (
        "import os; from pyro_scale.compile.cache import for_this_process as own; "
        "print(own(os.getpid()))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.iterdir())


def test_inductor_gets_a_directory_that_compilers_can_name(kept, monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert is_for_this_process(inductor._inductor_directory())  # not below "with a space"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "plain"))
    assert inductor._inductor_directory() == tmp_path / "plain"
    for unusable in (tmp_path / "a space", tmp_path / "file" / "below"):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(unusable))
        assert is_for_this_process(inductor._inductor_directory())
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_somebody")  # torch's default
    assert inductor._inductor_directory() == tmp_path / "own" / "inductor"


@pytest.mark.slow
@pytest.mark.long
def test_what_a_killed_process_left_half_written_is_built_again(monkeypatch):
    directory = cache.directory() / "inductor"  # has a header
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    build = 'print(inductor.build_library("extern \\"C\\" int half() { return 1; }"))'
    command = [sys.executable, "-c", f"from pyro_scale.compile import inductor; {build}"]
    for _ in range(2):
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        library = Path(ran.stdout.strip())
        assert library.stat().st_size > 0
        library.write_bytes(b"")
    library.unlink()


@pytest.mark.slow
@pytest.mark.long
def test_a_machines_first_library_does_not_wait_for_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    build = 'inductor.build_library("extern \\"C\\" int one() { return %d; }")'
    have = f"print(any(Path({str(tmp_path)!r}).glob('**/*.gch')))"
    imports = "from pathlib import Path; from pyro_scale.compile import inductor"
    code = "\n".join([imports, build % 1, have, build % 2, have])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


def test_headers_are_not_precompiled_where_inductor_cannot_hash_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "inductor" / "ab").mkdir(parents=True)
    (tmp_path / "inductor" / "ab" / "one.main.so").write_bytes(b"")

    def precompiles():
        with inductor._headers_precompiled_in_time():
            return config.cpp_cache_precompile_headers

    before = config.cpp_cache_precompile_headers
    assert precompiles() == (before and shutil.which("openssl") is not None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not precompiles()
    assert config.cpp_cache_precompile_headers == before


@pytest.mark.slow
@pytest.mark.long
def test_what_was_dropped_after_it_was_loaded_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        library = Path(inductor.build_library('extern "C" int two() { return 2; }'))
        assert library.stat().st_size > 0
        cache.write("another", b"", cache.Limits(code=0))
        assert not library.exists()


HOSTILE = """
    import os, sys, time, warnings
    import pyro, torch, pyro.distributions as dist
    import pyro_scale as ps

    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x)

    def run(num_chains=2):
        chosen = dict(num_samples=5, warmup_steps=0, thinning=1, seed=0, progress=False)
        sampler = ps.BAOA(model, lr=0.1, compile=True)
        sampler.run(torch.ones(9, 3), num_chains=num_chains, **chosen)
        return sampler.posterior.draws.attrs["program"]

    warnings.simplefilter("error", ps.errors.CompileWarning)
"""


def printed_by(code, **environment):
    """What a process of its own prints."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(HOSTILE) + code]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split("\n")[-2]


@pytest.mark.slow
@pytest.mark.long
def test_a_user_without_name_home_or_cache(tmp_path):
    """No entry in passwd and a file in the cache's place."""
    tmp_path.joinpath("file").write_text("")
    nameless = "def nobody(uid): raise KeyError(uid)\nimport pwd; pwd.getpwuid = nobody\n"
    names = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "")
    environment = {"HOME": "/dev/null", **names}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache.directory() / "inductor")  # has a header
    environment["PYRO_SCALE_CACHE_DIR"] = str(tmp_path / "file")
    assert printed_by(nameless + "print(run())", **environment) == "compiled loop"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_a_process_with_threads_runs(tmp_path):
    """OpenMP's threads do not come along; the child would wait for them."""
    code = textwrap.dedent("""
        torch.set_num_threads(2)
        assert run() == run(num_chains=1) == "compiled loop"
        child = os.fork()
        if not child:
            os._exit(run() != "compiled loop" or run(num_chains=1) != "compiled loop")
        for _ in range(1200):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            status = "hangs"
        print(status)
    """)
    assert printed_by(code, OMP_NUM_THREADS="2") == "0"
