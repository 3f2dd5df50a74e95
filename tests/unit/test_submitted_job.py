"""`ray_runtime_env` below `ray job submit`: Ray refuses a variable that both it and ray.init name."""

import json

import shim


def test_what_a_submitted_job_carries_is_not_said_again(monkeypatch):
    """What differs is left to Ray, which says so."""
    job = {"runtime_env": {"env_vars": {"MEGATRON_SHIM_EXCLUDE": "a", "MEGATRON_SHIM_STRICT": "1"}}}
    monkeypatch.setenv("MEGATRON_SHIM_EXCLUDE", "a")
    monkeypatch.setenv("MEGATRON_SHIM_STRICT", "1")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert shim.ray_runtime_env()["env_vars"] == {}
    assert shim.ray_runtime_env(exclude="b")["env_vars"] == {"MEGATRON_SHIM_EXCLUDE": "a,b"}
    given = {"env_vars": {"MEGATRON_SHIM_STRICT": "1"}}
    assert shim.ray_runtime_env(given)["env_vars"] == {"MEGATRON_SHIM_STRICT": "1"}
    everything = {"MEGATRON_SHIM_EXCLUDE": "a", "MEGATRON_SHIM_STRICT": "1"}
    for text in ("", "x", "[]", '{"runtime_env": 3}', '{"runtime_env": {"env_vars": []}}'):
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", text)
        assert shim.ray_runtime_env()["env_vars"] == everything
