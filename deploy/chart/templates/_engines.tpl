{{/* An instance of segue's own engine. */}}
{{- define "segue.own" -}}
{{- $values := index .root.Values .part -}}
command: [segue]
args:
- {{ .part }}
- --model={{ .root.Values.model.name }}
- --served-model-name={{ .root.Values.model.servedName }}
- --dtype={{ .root.Values.model.dtype }}
- --host=0.0.0.0
- --port=7000
- --data-port=7100
- --http-port=7200
- --transport=tcp
- --kv-gib={{ .root.Values.kvGiB }}
- --threads-per-worker={{ $values.cpu }}
{{- range $values.extraArgs }}
- {{ . | quote }}
{{- end }}
env:
{{ include "segue.env" .root }}
- name: SEGUE_ADVERTISE_HOST
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- name: SEGUE_REGISTRY
  value: dns://{{ .root.Release.Name }}-instances:7000
- name: SEGUE_SECRET_FILE
  value: /etc/segue/secret/secret
- name: SEGUE_CACHE
  value: /var/cache/segue
- name: SEGUE_REQUEST_BUDGET_S
  value: {{ .root.Values.requestBudgetS | quote }}
- name: SEGUE_DRAIN_S
  value: {{ .root.Values.requestBudgetS | quote }}
{{- include "segue.keys" .root }}
{{- include "segue.moreEnv" . }}
{{- include "segue.envFrom" . }}
ports:
- {name: control, containerPort: 7000}
- {name: data, containerPort: 7100}
- {name: http, containerPort: 7200}
{{ include "segue.probes" (dict "port" 7200 "ready" "/ready") }}
lifecycle:
  preStop:
    exec:
      command: [segue, drain, --self, --timeout={{ .root.Values.requestBudgetS }}]
{{- end }}

{{/* vLLM with SegueConnector. Prefill is asked at 8000; decode's sidecar listens there, and vLLM at 8200. */}}
{{- define "segue.vllm" -}}
{{- $values := index .root.Values .part -}}
{{- $prefill := eq .part "prefill" -}}
{{- $port := ternary 8000 8200 $prefill -}}
{{- $mooncake := eq .root.Values.llmd.kvConnector "mooncake" -}}
{{- $extra := dict "host" "0.0.0.0" "advertise_host" "$(POD_IP)" "port" 7000 "transport_port" 7100 "transport" (list "tcp") "secret_file" "/etc/segue/secret/secret" -}}
{{- if and $prefill $mooncake }}{{ $_ := set $extra "query_port" 8998 }}{{ end -}}
{{- if and (not $prefill) $mooncake }}{{ $_ := set $extra "peers" .root.Values.llmd.podNetworks }}{{ end -}}
{{- $config := dict "kv_connector" "SegueConnector" "kv_connector_module_path" "segue.integrations.vllm" "kv_role" (ternary "kv_producer" "kv_consumer" $prefill) "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra -}}
command: [vllm, serve]
args:
- {{ .root.Values.model.name | quote }}
- --served-model-name={{ .root.Values.model.servedName }}
- --dtype={{ .root.Values.model.dtype }}
- --port={{ $port }}
- --block-size=32
- --kv-transfer-config={{ toJson $config }}
{{- range $values.extraArgs }}
- {{ . | quote }}
{{- end }}
env:
{{ include "segue.env" .root }}
- name: PYTHONHASHSEED
  value: "42"
- name: VLLM_CPU_KVCACHE_SPACE
  value: {{ .root.Values.kvGiB | quote }}
- name: VLLM_CACHE_ROOT
  value: /var/cache/segue/vllm
{{- include "segue.moreEnv" . }}
{{- include "segue.envFrom" . }}
ports:
- {name: http, containerPort: {{ $port }}}
- {name: control, containerPort: 7000}
- {name: data, containerPort: 7100}
{{- if and $prefill $mooncake }}
- {name: query, containerPort: 8998}
{{- end }}
{{ include "segue.probes" (dict "port" $port "ready" "/health") }}
lifecycle:
  preStop:
    sleep: {seconds: {{ .root.Values.requestBudgetS }}}
{{- end }}

{{/* llm-d's routing sidecar beside decode. */}}
{{- define "segue.sidecar" -}}
- name: routing-sidecar
  image: {{ .Values.llmd.sidecarImage }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  args:
  - --port=8000
  - --model-server-port=8200
  - --kv-connector={{ .Values.llmd.kvConnector }}
  {{- if eq .Values.llmd.kvConnector "mooncake" }}
  - --mooncake-bootstrap-port=8998
  {{- end }}
  - --prefill-max-retries=2
  - --secure-proxy=false
  env:
  - name: POD_IP
    valueFrom:
      fieldRef: {fieldPath: status.podIP}
  ports:
  - {name: sidecar, containerPort: 8000}
  securityContext:
    {{- include "segue.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {memory: 256Mi}
{{- end }}
