{{/* Labels that select one part. */}}
{{- define "segue.selector" -}}
app.kubernetes.io/name: segue
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* Labels that select all parts. */}}
{{- define "segue.all" -}}
app.kubernetes.io/name: segue
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels by which llm-d finds a pod and its role. */}}
{{- define "segue.llmd" -}}
llm-d.ai/engine-type: vllm
llm-d.ai/role: {{ .part }}
{{- end }}

{{- define "segue.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{/* What a container may do: nothing but to run and to write into its volumes. */}}
{{- define "segue.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "segue.resources" -}}
requests:
  cpu: {{ .cpu | quote }}
  memory: {{ .memory }}
limits:
  memory: {{ .memory }}
{{- end }}

{{/* Ten minutes to load the model, then one answer every ten seconds. */}}
{{- define "segue.probes" -}}
startupProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet: {path: {{ .ready }}, port: {{ .port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /health, port: {{ .port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{/* Environment of every container: where it may write. */}}
{{- define "segue.env" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /var/cache/segue/huggingface
{{- end }}

{{/* Further variables of a part's container. */}}
{{- define "segue.moreEnv" -}}
{{- $values := index .root.Values .part -}}
{{- with concat .root.Values.env ($values.env | default list) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "segue.envFrom" -}}
{{- $values := index .root.Values .part -}}
{{- with concat .root.Values.envFrom ($values.envFrom | default list) }}
envFrom:
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels and annotations of a part's pods that the user gives. */}}
{{- define "segue.podLabels" -}}
{{- $values := index .root.Values .part -}}
{{- with merge dict ($values.podLabels | default dict) .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "segue.podAnnotations" -}}
{{- $values := index .root.Values .part -}}
{{- with merge dict ($values.podAnnotations | default dict) .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* API keys: an instance's HTTP port generates too. */}}
{{- define "segue.keys" -}}
{{- if .Values.apiKeysSecret }}
- name: SEGUE_API_KEY_FILE
  value: /etc/segue/keys/keys
{{- end }}
{{- end }}

{{- define "segue.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/segue}
- {name: secret, mountPath: /etc/segue/secret, readOnly: true}
{{- if .Values.model.claim }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.apiKeysSecret }}
- {name: keys, mountPath: /etc/segue/keys, readOnly: true}
{{- end }}
{{- end }}

{{- define "segue.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- if .Values.cacheClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.cacheClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.cacheSize }}}
  {{- end }}
- name: secret
  secret:
    secretName: {{ .Values.secretName }}
    defaultMode: 0440
{{- if .Values.model.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.model.claim }}, readOnly: true}
{{- end }}
{{- if .Values.apiKeysSecret }}
- name: keys
  secret:
    secretName: {{ .Values.apiKeysSecret }}
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* The head of each Deployment. */}}
{{- define "segue.strategy" -}}
minReadySeconds: {{ .Values.minReadySeconds }}
revisionHistoryLimit: 5
strategy:
  type: RollingUpdate
  rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
{{- end }}

{{/* What every pod has beside its containers. */}}
{{- define "segue.pod" -}}
{{- $values := index .root.Values .part -}}
serviceAccountName: {{ .root.Release.Name }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . }}
{{- end }}
{{- with merge dict ($values.nodeSelector | default dict) .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat .root.Values.tolerations ($values.tolerations | default list) }}
tolerations:
{{ toYaml . }}
{{- end }}
{{- with $values.affinity | default .root.Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName | default .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName | default .root.Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
automountServiceAccountToken: false
# A Service called `segue` would set SEGUE_PORT, which is a setting.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add .root.Values.requestBudgetS 60 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Otherwise every start makes the kernels writable for a group, and segue uses no such kernels.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "segue.selector" . | nindent 6 }}
{{- end }}
