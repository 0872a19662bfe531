{{/* PodMonitors: jobs are short, a monitor of pods sees them as soon as they run. */}}

{{- define "muster.monitoring.api" -}}monitoring.coreos.com/v1{{- end -}}

{{- define "muster.monitoring.check" -}}
{{- if not (or (.Capabilities.APIVersions.Has (printf "%s/PodMonitor" (include "muster.monitoring.api" .))) (.Capabilities.APIVersions.Has (include "muster.monitoring.api" .))) -}}
{{- fail (printf "monitoring.enabled: the cluster has no API %s; install the Prometheus operator first, or set monitoring.enabled=false (rendering without a cluster: --api-versions %s)" (include "muster.monitoring.api" .) (include "muster.monitoring.api" .)) -}}
{{- end -}}
{{- end -}}

{{- define "muster.monitoring.labels" -}}
{{ include "muster.labels" (list . "monitoring") }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}
