{{/* The rollout servers: vLLM on the pod's loopback, an nginx gate before it with a port for each kind of request. */}}

{{- define "muster.fleet.name" -}}
{{ include "muster.fullname" . }}-fleet
{{- end -}}

{{- define "muster.fleet.secret" -}}
{{- default .Values.fleet.admin.secretName .Values.fleet.admin.existingSecret -}}
{{- end -}}

{{/* Requests that rollouts make. */}}
{{- define "muster.fleet.generatePaths" -}}
/inference/v1/generate /v1/completions /v1/chat/completions /v1/models /tokenize /detokenize /version
{{- end -}}

{{/* Requests that change what is served, or stop serving. */}}
{{- define "muster.fleet.adminPaths" -}}
/pause /resume /is_paused /collective_rpc /reset_prefix_cache /update_weight_version /weight_info /v1/load_lora_adapter /v1/unload_lora_adapter
{{- end -}}

{{- define "muster.fleet.gracePeriod" -}}
{{- $least := add .Values.fleet.shutdown.preStopSeconds .Values.fleet.shutdown.drainSeconds 30 -}}
{{- $given := .Values.fleet.shutdown.gracePeriodSeconds -}}
{{- if kindIs "invalid" $given -}}
{{- $least -}}
{{- else if lt (int $given) (int $least) -}}
{{- fail (printf "fleet.shutdown.gracePeriodSeconds: %d is too short, servers would be killed while they drain; it must be at least preStopSeconds + drainSeconds + 30 = %d, or null" (int $given) (int $least)) -}}
{{- else -}}
{{- $given -}}
{{- end -}}
{{- end -}}

{{- define "muster.fleet.nginx" -}}
# One port for each kind of request; whatever is not named is not there.
pid /tmp/gate/nginx.pid;
error_log stderr warn;
worker_processes 2;
worker_shutdown_timeout {{ .Values.fleet.shutdown.drainSeconds }}s;
events {
  worker_connections 8192;
}
http {
  access_log off;
  server_tokens off;
  client_body_temp_path /tmp/gate/body;
  proxy_temp_path /tmp/gate/proxy;
  fastcgi_temp_path /tmp/gate/fastcgi;
  uwsgi_temp_path /tmp/gate/uwsgi;
  scgi_temp_path /tmp/gate/scgi;
  client_max_body_size 64m;
  client_body_buffer_size 1m;

  # a connection for each request: on loopback it costs nothing, and none is found closed
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  proxy_set_header Host $host;
  # a sample is asked for once; who asks decides about a second time
  proxy_next_upstream off;
  proxy_buffering off;
  proxy_request_buffering off;
  proxy_connect_timeout 5s;
  proxy_read_timeout 3600s;
  proxy_send_timeout 300s;

  server {
    listen {{ .Values.fleet.ports.generate }};
    location / { return 404; }
    location = /gate { return 200; }
    location = /health { proxy_read_timeout 30s; proxy_pass http://127.0.0.1:{{ .Values.fleet.ports.vllm }}/health; }
    {{- range splitList " " (include "muster.fleet.generatePaths" .) }}
    location = {{ . }} { proxy_pass http://127.0.0.1:{{ $.Values.fleet.ports.vllm }}{{ . }}; }
    {{- end }}
    # ends requests by the ids that their senders chose; /abort_requests, which can end all, stays shut
    location = /inference/v1/abort_requests {
      limit_except POST { deny all; }
      proxy_read_timeout 30s;
      proxy_pass http://127.0.0.1:{{ .Values.fleet.ports.vllm }}/inference/v1/abort_requests;
    }
  }
  server {
    listen {{ .Values.fleet.ports.metrics }};
    location / { return 404; }
    location = /metrics {
      limit_except GET { deny all; }
      proxy_read_timeout 30s;
      proxy_pass http://127.0.0.1:{{ .Values.fleet.ports.vllm }}/metrics;
    }
  }
  server {
    listen {{ .Values.fleet.ports.admin }};
    include /tmp/gate/token.conf;
    location / { return 404; }
    {{- range splitList " " (include "muster.fleet.adminPaths" .) }}
    location = {{ . }} { proxy_set_header Authorization ""; proxy_pass http://127.0.0.1:{{ $.Values.fleet.ports.vllm }}{{ . }}; }
    {{- end }}
  }
}
{{- end -}}

{{- define "muster.fleet.gateStart" -}}
# Puts the token where only nginx reads it. "if" compares exactly; a map would ignore upper and lower case.
set -eu
umask 077
token=$(cat /etc/muster/admin/token)
case $token in
  *[!A-Za-z0-9._~+/=-]*) echo "the admin token may hold only A-Z a-z 0-9 . _ ~ + / = -" >&2; exit 2;;
esac
if [ "${#token}" -lt 32 ]; then
  echo "the admin token has ${#token} characters, it needs at least 32" >&2
  exit 2
fi
mkdir -p /tmp/gate
printf 'if ($http_authorization != "Bearer %s") { return 401; }\n' "$token" > /tmp/gate/token.conf
exec nginx -e stderr -c /etc/muster/gate/nginx.conf -g 'daemon off;'
{{- end -}}
