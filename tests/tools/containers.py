#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether what packaging/container and packaging/kubernetes name exists.

    tests/tools/containers.py BUILD

Reads the Containerfile, the compose file and the manifests, and holds options, commands, paths,
users, libraries and ports against the programs of BUILD, which it starts as they do. Needs
python3-yaml; uses yamllint and docker-compose as well, where Debian's are installed. Prints `N
passed, M failed, K skipped`.
"""
import os
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import yaml
except ImportError:
    yaml = None

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
FOLDER = os.path.join(ROOT, "packaging")
CONTAINERFILE = os.path.join(FOLDER, "container", "Containerfile")
COMPOSE = os.path.join(FOLDER, "container", "compose.yaml")
DAEMONSET = os.path.join(FOLDER, "kubernetes", "daemonset.yaml")
ENGINE = os.path.join(FOLDER, "kubernetes", "engine.yaml")
BUILD = ""
BOUND = 60  # seconds: for hangs alone
STYLE = ("{extends: default, rules: {line-length: {max: 100}, document-start: disable, "
         "braces: {max-spaces-inside: 0}, comments: {min-spaces-from-content: 1}}}")


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def instructions():
    """(stage, instruction, text) of each line of the Containerfile, continuations joined."""
    stage, found = None, []
    text = re.sub(r"^#.*\n", "", read(CONTAINERFILE), flags=re.M).replace("\\\n", " ")
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.split()[-1]
        found.append((stage, word, rest))
    return found


def texts(stage, word):
    return [rest for s, w, rest in instructions() if (s, w) == (stage, word)]


def program(name, *arguments, environment=None, check=True):
    """Output of a program of the build, which knows of the environment nothing but this."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("KVQ")}
    done = subprocess.run([os.path.join(BUILD, "bin", name), *arguments], capture_output=True,
                          text=True, timeout=BOUND, env={**plain, **(environment or {})})
    if check and done.returncode:
        raise AssertionError(f"{name} {arguments}: {done.returncode}: {done.stderr}")
    return done.stdout


def image_environment():
    """ENV of the image of kvqd."""
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(texts("kvqd", "ENV"))))


class Image(unittest.TestCase):
    """The Containerfile."""

    def test_sources(self):
        """What is copied exists, in the tree or in a stage before."""
        stages = [s for s, word, _ in instructions() if word == "FROM"]
        self.assertEqual(stages, ["build", "engine", "kvqd"])
        for stage, word, rest in instructions():
            words = rest.split()
            if word == "COPY" and words[0].startswith("--from="):
                self.assertIn(words[0][7:], stages[:stages.index(stage)])
            elif word == "COPY":
                for source in words[:-1]:
                    self.assertTrue(os.path.exists(os.path.join(ROOT, source)), source)

    def test_context(self):
        """Nothing that the build reads is kept out of it."""
        ignored = [line for line in read(os.path.join(ROOT, ".dockerignore")).splitlines()
                   if line and not line.startswith("#")]
        folders = re.findall(r"add_subdirectory\((\S+)\)", read(os.path.join(ROOT,
                                                                           "CMakeLists.txt")))
        copied = [word for _, w, rest in instructions() if w == "COPY" and "--from" not in rest
                  for word in rest.split()[:-1]]
        self.assertIn("tests", folders)
        for path in (*folders, *copied, "cmake", "packaging", "docs/man"):
            for pattern in ignored:
                self.assertFalse(f"{path}/".startswith(f"{pattern}/"), f"{pattern}: {path}")

    def test_presets(self):
        presets = set(re.findall(r'"name": "(\w+)"', read(os.path.join(ROOT, "CMakePresets.json"))))
        self.assertLessEqual({"release", "gpu"}, presets)
        self.assertEqual(texts("build", "ARG"), ["PRESET=release"])
        parts = re.search(r"for part in ([\w ]+);", " ".join(texts("build", "RUN")))[1].split()
        known = read(os.path.join(ROOT, "cmake", "install.cmake"))
        for part in parts:
            self.assertRegex(known, rf"COMPONENT {part}\b")

    @unittest.skipUnless(os.path.exists("/etc/debian_version"), "needs dpkg")
    def test_libraries(self):
        """Packages that the images install have every library that programs ask for."""
        for stage, names in (("kvqd", ("bin/kvqd", "bin/kvqctl", "lib/libkvq.so")),
                             ("engine", ("lib/libkvq.so",))):
            installed = " ".join(texts(stage, "RUN"))
            asked = subprocess.run(["objdump", "-p", *(os.path.join(BUILD, n) for n in names)],
                                   text=True, capture_output=True, check=True).stdout
            libraries = sorted(set(re.findall(r"NEEDED +(\S+)", asked)))
            told = subprocess.run(["dpkg", "-S", *(f"*/{library}" for library in libraries)],
                                  capture_output=True, text=True).stdout
            for library in libraries:
                owners = set(re.findall(rf"^([\w.+-]+)\S*: \S+/{re.escape(library)}$", told, re.M))
                if "libc6" not in owners and owners:
                    self.assertTrue(any(re.search(rf"\b{re.escape(o)}\b", installed)
                                        for o in owners), f"{stage}: {library} of {owners}")

    def test_health(self):
        command = re.search(r"CMD (\[.*\])", " ".join(texts("kvqd", "HEALTHCHECK")))[1]
        words = re.findall(r'"([^"]+)"', command)
        self.assertEqual(words[0], "kvqctl")
        check_command(self, words)

    def test_options(self):
        check_options(self, image_environment())


def check_options(test, environment):
    """kvqd takes each KVQD_ variable, and has the options."""
    ours = {k: str(v) for k, v in environment.items() if k.startswith("KVQD_")}
    known = program("kvqd", "--help")
    for name in ours:
        option = name[5:].lower().replace("_", "-")
        test.assertRegex(known, rf"--{option}\b")
    program("kvqd", "--print-config", environment=ours)


def check_command(test, words):
    """kvqctl has the command and its options."""
    at = next(i for i, w in enumerate(words[1:] + ["--"], 1) if w.startswith("--"))
    shown = program("kvqctl", "help", *words[1:at])
    for option in (w for w in words[at:] if w.startswith("--")):
        test.assertRegex(shown, rf"{option}\b")


@unittest.skipUnless(yaml, "needs python3-yaml")
class Compose(unittest.TestCase):
    """compose.yaml."""

    def setUp(self):
        self.services = yaml.safe_load(read(COMPOSE))["services"]

    def test_builds(self):
        stages = [s for s, word, _ in instructions() if word == "FROM"]
        for service in self.services.values():
            build = service["build"]
            context = os.path.normpath(os.path.join(os.path.dirname(COMPOSE), build["context"]))
            self.assertEqual(context, os.path.normpath(ROOT))
            self.assertTrue(os.path.exists(os.path.join(context, build["dockerfile"])))
            self.assertIn(build["target"], stages)

    def test_options(self):
        check_options(self, self.services["kvqd"]["environment"])

    def test_one_directory(self):
        """Both have the same volume where they look for it, and the engine has its group."""
        runtime = image_environment()["KVQD_RUNTIME_DIR"]
        for service in self.services.values():
            self.assertIn(f"runtime:{runtime}", service["volumes"])
        engine = self.services["engine"]
        self.assertEqual(engine["environment"]["KVQ_RUNTIME_DIR"], runtime)
        gid = re.search(r"groupadd .*--gid (\d+) kvqd", " ".join(texts("kvqd", "RUN")))[1]
        self.assertEqual(engine["group_add"], [gid])
        self.assertIn("HEALTHCHECK", [w for s, w, _ in instructions() if s == "kvqd"])
        self.assertEqual(engine["depends_on"]["kvqd"]["condition"], "service_healthy")

    def test_memory(self):
        """The limit holds the pool and the buffers."""
        kvqd = self.services["kvqd"]
        numbers = [int(re.match(r"(\d+)gb?$", text)[1]) for text in (
            kvqd["environment"]["KVQD_POOL_BYTES"], kvqd["environment"]["KVQD_BUFFER_BYTES"],
            kvqd["mem_limit"])]
        self.assertLess(numbers[0] + numbers[1], numbers[2])

    def test_it_works(self):
        """A daemon with these options, and the engine's program: what the containers run."""
        environment = {**image_environment(), **self.services["kvqd"]["environment"]}
        folder = tempfile.mkdtemp(prefix="kvq-containers-")
        self.addCleanup(subprocess.run, ["rm", "-rf", folder], check=True)
        os.mkdir(os.path.join(folder, "store"), 0o700)
        ours = {k: v for k, v in environment.items() if k.startswith("KVQD_")}
        ours.update(KVQD_RUNTIME_DIR=os.path.join(folder, "run"), KVQD_HTTP_ADDRESS="",
                    KVQD_STORAGE_DIR=os.path.join(folder, "store"))
        daemon = subprocess.Popen([os.path.join(BUILD, "bin", "kvqd"), "--ready-fd", "1"],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  env={**os.environ, **ours})
        try:
            self.assertEqual(daemon.stdout.readline(), b"ready\n")
            health = re.search(r"CMD (\[.*\])", " ".join(texts("kvqd", "HEALTHCHECK")))[1]
            program(*re.findall(r'"([^"]+)"', health),
                    environment={"KVQ_RUNTIME_DIR": ours["KVQD_RUNTIME_DIR"]})
            example = re.search(r'"(/usr/share/kvq/(\w+\.py))"', texts("engine", "CMD")[0])
            self.assertIn(f"examples/{example[2]} {example[1]}", texts("engine", "COPY"))
            done = subprocess.run(
                [sys.executable, os.path.join(ROOT, "examples", example[2])], text=True,
                capture_output=True, timeout=BOUND,
                env={**os.environ, "KVQ_RUNTIME_DIR": ours["KVQD_RUNTIME_DIR"],
                     "KVQ_LIBRARY": os.path.join(BUILD, "lib", "libkvq.so"),
                     "PYTHONPATH": os.path.join(ROOT, "client", "python")})
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("240 tokens", done.stdout)
        finally:
            daemon.terminate()
            daemon.wait(BOUND)
            daemon.stdout.close()


@unittest.skipUnless(yaml, "needs python3-yaml")
class Kubernetes(unittest.TestCase):
    """The manifests."""

    def setUp(self):
        documents = list(yaml.safe_load_all(read(DAEMONSET)))
        self.of_kind = {document["kind"]: document for document in documents}
        self.pod = self.of_kind["DaemonSet"]["spec"]["template"]["spec"]
        self.kvqd = self.pod["containers"][0]
        self.engine = yaml.safe_load(read(ENGINE))["spec"]

    def environment(self):
        return {**self.of_kind["ConfigMap"]["data"],
                **{one["name"]: one["value"] for one in self.kvqd["env"]}}

    def test_selectors(self):
        spec = self.of_kind["DaemonSet"]["spec"]
        self.assertEqual(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])
        self.assertEqual(self.kvqd["envFrom"][0]["configMapRef"]["name"],
                         self.of_kind["ConfigMap"]["metadata"]["name"])
        for kind in ("ConfigMap", "DaemonSet"):
            self.assertEqual(self.of_kind[kind]["metadata"]["namespace"],
                             self.of_kind["Namespace"]["metadata"]["name"])

    def test_options(self):
        for name, value in self.environment().items():
            self.assertIsInstance(value, str, f"{name} has to be a string")
        check_options(self, self.environment())

    def test_service_links(self):
        """Variables that Kubernetes makes of a Service named kvqd would end the start."""
        done = subprocess.run([os.path.join(BUILD, "bin", "kvqd"), "--print-config"],
                              capture_output=True, text=True, timeout=BOUND,
                              env={**os.environ, "KVQD_SERVICE_HOST": "10.0.0.1"})
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("KVQD_SERVICE_HOST", done.stderr)
        for pod in (self.pod, self.engine):
            self.assertIs(pod["enableServiceLinks"], False)

    def test_probes(self):
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            words = self.kvqd[probe]["exec"]["command"]
            self.assertEqual(words[0], "kvqctl")
            check_command(self, words)
            waits = int(words[words.index("--timeout") + 1])
            self.assertLess(waits, 1000 * self.kvqd[probe]["timeoutSeconds"])

    def test_port(self):
        """The one of http_address's default."""
        default = re.search(r"^# http_address = \S+:(\d+)", read(os.path.join(FOLDER, "kvqd.conf")),
                            re.M)[1]
        self.assertEqual([str(p["containerPort"]) for p in self.kvqd["ports"]], [default])

    def test_mounts(self):
        """Volumes exist, kvqd finds its directories there, and the engine mounts the same one."""
        volumes = {v["name"]: v["hostPath"]["path"] for v in self.pod["volumes"]}
        for container in (*self.pod["initContainers"], *self.pod["containers"]):
            for mount in container["volumeMounts"]:
                self.assertEqual(volumes[mount["name"]], mount["mountPath"])
        environment = self.environment()
        self.assertEqual(environment["KVQD_RUNTIME_DIR"], volumes["runtime"])
        self.assertEqual(environment["KVQD_STORAGE_DIR"], volumes["storage"])
        self.assertEqual(self.engine["volumes"][0]["hostPath"]["path"], volumes["runtime"])
        container = self.engine["containers"][0]
        self.assertEqual(container["volumeMounts"][0]["mountPath"], volumes["runtime"])
        self.assertEqual(container["env"][0], {"name": "KVQ_RUNTIME_DIR",
                                               "value": volumes["runtime"]})

    def test_users(self):
        """kvqd's user and group are the image's, and the engine is in that group."""
        made = " ".join(texts("kvqd", "RUN"))
        uid = int(re.search(r"useradd .*--uid (\d+)", made)[1])
        gid = int(re.search(r"groupadd .*--gid (\d+)", made)[1])
        security = self.kvqd["securityContext"]
        self.assertEqual((security["runAsUser"], security["runAsGroup"]), (uid, gid))
        self.assertIn(f"{uid}:{gid}", self.pod["initContainers"][0]["command"][-1])
        self.assertEqual(self.engine["securityContext"]["supplementalGroups"], [gid])

    def test_namespaces(self):
        """Daemon and engine agree on what they share."""
        for field in ("hostPID", "hostIPC", "runtimeClassName"):
            self.assertEqual(self.pod[field], self.engine[field])

    def test_memory_and_end(self):
        """The limit holds pool and buffers; the grace is longer than a drain."""
        data = self.of_kind["ConfigMap"]["data"]
        sizes = [int(data[name][:-2]) for name in ("KVQD_POOL_BYTES", "KVQD_BUFFER_BYTES")]
        limit = int(self.kvqd["resources"]["limits"]["memory"][:-2])
        self.assertLess(sum(sizes), limit)
        self.assertLess(int(data["KVQD_DRAIN_MS"]), 1000 *
                        self.pod["terminationGracePeriodSeconds"])


class Style(unittest.TestCase):
    def test_yamllint(self):
        try:
            done = subprocess.run(["yamllint", "-d", STYLE, COMPOSE, DAEMONSET, ENGINE],
                                  capture_output=True, text=True, timeout=BOUND)
        except FileNotFoundError:
            self.skipTest("needs yamllint")
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_compose(self):
        """The compose file is one, also with the lines for GPUs that are commented out."""
        text = read(COMPOSE)
        for more in (text, re.sub(r"^    # ((?: *- | *)\w+:)", r"    \1", text, flags=re.M)):
            try:
                done = subprocess.run(["docker-compose", "-f", "-", "config", "-q"], input=more,
                                      capture_output=True, text=True, timeout=BOUND,
                                      cwd=os.path.dirname(COMPOSE))
            except FileNotFoundError:
                self.skipTest("needs docker-compose")
            self.assertEqual(done.returncode, 0, done.stderr)


def main():
    global BUILD
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    BUILD = os.path.abspath(sys.argv[1])
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromTestCase(case)
                               for case in (Image, Compose, Kubernetes, Style))
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
    failed, skipped = len(result.failures + result.errors), len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
